// Sparklines of the last ten minutes, drawn by uPlot.

import uPlot from "../vendor/uPlot.esm.js";
import { setAttribute, setText } from "./dom.js";
import { time } from "./format.js";

const MINUTES = 10;
const charts = new Set();

const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// `series`: [{label, line, fill}], the names of custom properties. `caption` shows what is under the pointer.
export class Sparkline {
  constructor(place, caption, series, format) {
    this.place = place;
    this.caption = caption;
    this.series = series;
    this.format = format;
    const options = {
      width: place.clientWidth || 240,
      height: place.clientHeight || 48,
      padding: [3, 0, 1, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 5 }, drag: { setScale: false } },
      select: { show: false },
      scales: { x: { time: true }, y: { range: (_, __, high) => [0, Math.max(high ?? 0, 1) * 1.08] } },
      axes: [{ show: false }, { show: false }],
      series: [
        {},
        ...series.map((one) => ({
          label: one.label,
          stroke: colour(one.line),
          fill: one.fill ? colour(one.fill) : undefined,
          width: 1.5,
          points: { show: false },
        })),
      ],
      hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx)] },
    };
    this.data = [[], ...series.map(() => [])];
    this.plot = new uPlot(options, this.data, place);
    place.setAttribute("role", "img");
    this.observer = new ResizeObserver(() => {
      if (place.clientWidth > 0) this.plot.setSize({ width: place.clientWidth, height: place.clientHeight });
    });
    this.observer.observe(place);
    charts.add(this);
  }

  show(times, ...values) {
    this.data = [times, ...values];
    const end = times.at(-1) ?? 0;
    this.plot.batch(() => {
      this.plot.setData(this.data, false);
      this.plot.setScale("x", { min: end - MINUTES * 60, max: end });
      this.plot.setScale("y", { min: null, max: null });
    });
    this.tell(this.plot.cursor.idx);
    const said = this.series.map((one, index) => {
      const known = values[index].filter((value) => value !== null);
      const peak = known.length ? this.format(Math.max(...known)) : "–";
      return `${one.label}: now ${this.format(values[index].at(-1) ?? null)}, at most ${peak}`;
    });
    setAttribute(this.place, "aria-label", `Last ${MINUTES} minutes. ${said.join("; ")}`);
  }

  tell(index) {
    if (this.plot === undefined) return;
    const [times, ...values] = this.data;
    if (index !== null && index !== undefined && times[index] !== undefined) {
      const parts = this.series.map((one, at) => `${this.format(values[at][index])} ${one.label}`);
      setText(this.caption, `${time(times[index])}  ${parts.join(", ")}`);
      return;
    }
    const known = values[0].filter((value) => value !== null);
    const peak = known.length ? this.format(Math.max(...known)) : "–";
    setText(this.caption, `${this.series[0].label}, ${MINUTES} min, peak ${peak}`);
  }

  end() {
    charts.delete(this);
    this.observer.disconnect();
    this.plot.destroy();
  }
}

document.addEventListener("theme", () => {
  for (const chart of charts) chart.plot.redraw(false);
});
