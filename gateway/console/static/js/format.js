// Numbers and names as people read them.

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const count = (value) => (value < 10000 ? whole.format(value) : compact.format(value));
export const exactly = (value) => whole.format(value);
export const percent = (share) => `${Math.round(share * 100)} %`;
export const time = (unix) => clock.format(new Date(unix * 1000));

export function rate(value) {
  if (value === null) return "–";
  return value >= 100 ? count(Math.round(value)) : String(Math.round(value * 10) / 10);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 60 ? `${value.toFixed(value < 10 ? 1 : 0)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function span(value) {
  const units = [[604800, "week"], [86400, "day"], [3600, "hour"], [60, "min"], [1, "s"]];
  const [size, name] = units.find(([unit]) => value % unit === 0) ?? [1, "s"];
  const many = value / size;
  return many === 1 ? name : `${many} ${name}`;
}

export function contract(one) {
  if (one.kind === "use") return `use ${one.use}`;
  if (one.kind === "wait") return `wait ${one.wait} s, then ${one.then}`;
  return one.kind;
}

export const busy = (one) => `${one.use} (over ${one.waiting} waiting, or ${percent(one.kv)} of the KV cache)`;

export function signal(value) {
  if (value === null || value === undefined) return "not given";
  if (value === true) return "yes";
  if (value === false) return "no";
  if (typeof value === "number") return Number.isInteger(value) ? exactly(value) : value.toFixed(2);
  return value;
}
