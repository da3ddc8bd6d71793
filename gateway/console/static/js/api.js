// The admin API. The session is a cookie that scripts cannot read; nothing secret is in an address.

export class Unauthorized extends Error {}

async function ask(path, options = {}) {
  const reply = await fetch(`../admin/${path}`, { cache: "no-store", credentials: "same-origin", ...options });
  if (reply.status === 401 && path !== "login") throw new Unauthorized();
  if (reply.ok) return reply.status === 204 ? null : reply.json();
  let message = `the gateway answers ${reply.status}`;
  try {
    message = (await reply.json()).error.message;
  } catch {
    // A proxy's own page: its status says as much.
  }
  throw new Error(message);
}

const send = (path, body) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

export const session = () => ask("session");
export const live = (cursor, signal) => ask(`live?cursor=${encodeURIComponent(cursor)}`, { signal });
export const why = (id) => ask(`decisions/${encodeURIComponent(id)}`);
export const policy = () => ask("policy");
export const tenants = () => ask("tenants");
export const explain = (request) => send("explain", request);
export const reload = () => send("reload", {});
export const signIn = (token) => send("login", { token });
export const signOut = () => send("logout", {});
