// The rows that the gateway has sent, by column.

const MOST = 300;

let columns = new Map();
let rows = [];

export function add(answer) {
  if (answer.columns) {
    columns = new Map(answer.columns.map((name, index) => [name, index + 1]));
    rows = [];
  }
  rows = [...rows, ...answer.history].slice(-MOST);
}

export const times = () => rows.map((row) => row[0]);

export function column(name) {
  const index = columns.get(name);
  return rows.map((row) => (index === undefined ? null : row[index]));
}

export const latest = (name) => column(name).at(-1) ?? null;

// The mean of the last rows: single ones jump.
export function recent(name, many = 5) {
  const known = column(name).slice(-many).filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
