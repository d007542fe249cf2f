// The console's page: shows the pictures that the server makes, and asks it. What is merged, aged and compared is
// decided there. Text only ever becomes text: no markup is made of what anybody named.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const SIGN = { up: "●", suspect: "◐", draining: "▽", down: "✕", unknown: "?", slow: "◔", ejected: "✕", starting: "◌", probing: "◔" };
const calm = matchMedia("(prefers-reduced-motion: reduce)");
let me = {}, now = {}, shown = {}, past = null, archive = null, mark = null, skew = 0, lastHeard = 0, chunks = [], kept = new Map(), coast = null;
let tenant = "", which = "", selected = "", runs = {}, offered = [];

// -- making elements

function put(at, tag, attrs = {}, ...inner) {
  const made = at && at.namespaceURI === SVG || tag === "svg" ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attrs)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...inner.filter((one) => one !== null && one !== undefined));
  if (at) at.append(made);
  return made;
}
// An attribute that is set again, though it is the same, is laid out anew.
const set = (at, name, value) => { if (at.getAttribute(name) !== String(value)) at.setAttribute(name, value); };
const el = (tag, attrs, ...inner) => put(null, tag, attrs, ...inner);
const clear = (at) => { at.replaceChildren(); return at; };
// What `make` draws, only where what it says has changed, so that focus stays on a button; where not, it goes to the first.
function same(at, says, make) {
  const text = JSON.stringify(says), had = at.contains(document.activeElement);
  if (at.dataset.is === text) return;
  at.dataset.is = text;
  make(clear(at));
  if (had) (at.querySelector("button, a, input, select") || $("view")).focus();
}
const num = (value, digits = 0, unit = "") => typeof value === "number" ? value.toFixed(digits) + unit : "–";
const pct = (value) => typeof value === "number" ? Math.round(value * 100) + " %" : "–";
const clock = (ms) => ms ? new Date(ms).toLocaleTimeString([], { hour12: false }) : "–";
const state = (name, more = "") => el("span", { class: "s-" + (name in SIGN ? name : "dim") }, (SIGN[name] || "·") + " " + (name || "–") + more);
const gauge = (value, label) => typeof value === "number" ? el("meter", { min: 0, max: 1, low: 0.75, high: 0.92, optimum: 0.1, value: Math.min(1, value), "aria-label": label + " " + pct(value), title: pct(value) }) : "–";

// Rows by key: those that stay keep their element, so that focus and selection do, too.
function rows(...given) { for (const _ of rowsInPieces(...given)); }
const PIECE = 8;
function* rowsInPieces(table, items, key, cells, more = {}) {
  const body = (typeof table === "string" ? $(table) : table).tBodies[0], old = new Map();
  for (const row of body.rows) old.set(row.dataset.key, row);
  const wanted = [];
  for (const item of items) {
    if (wanted.length % PIECE === PIECE - 1) yield;
    const name = key(item), row = old.get(name) || el("tr");
    old.delete(name);
    row.dataset.key = name;
    const list = cells(item);
    while (row.cells.length > list.length) row.deleteCell(-1);
    list.forEach((cell, i) => {
      const [value, cls = ""] = Array.isArray(cell) ? cell : [cell];
      const at = row.cells[i] || row.insertCell();
      if (at.className !== cls) at.className = cls;
      if (value instanceof Node) { if (at.innerHTML !== value.outerHTML) at.replaceChildren(value); }
      else if (at.textContent !== String(value)) at.textContent = value;
    });
    row.classList.toggle("stale", Boolean(more.stale && more.stale(item)));
    if (more.open && !row.hasAttribute("tabindex")) {
      row.tabIndex = 0;
      row.addEventListener("click", () => more.open(row.dataset.key));
      row.addEventListener("keydown", (event) => { if (event.target === row && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); more.open(row.dataset.key); } });
    }
    if (more.chosen) row.setAttribute("aria-selected", String(more.chosen(name)));
    wanted.push(row);
  }
  if (!wanted.length) wanted.push(el("tr", {}, el("td", { class: "empty", colspan: 20 }, more.none || "none")));
  for (const row of old.values()) row.remove();
  wanted.forEach((row, i) => { if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] || null); });
  while (body.rows.length > wanted.length) body.deleteRow(-1);
}

function options(select, names, first) {
  const want = (first === undefined ? [] : [["", first]]).concat(names.map((name) => [name, name]));
  if (select.dataset.is === JSON.stringify(want)) return;
  const value = select.value;
  clear(select).append(...want.map(([name, text]) => el("option", { value: name }, text)));
  select.dataset.is = JSON.stringify(want);
  if (want.some(([name]) => name === value)) select.value = value;
}

// -- talking to the server

async function ask(path, body) {
  const init = body === undefined ? {} : { method: "POST", headers: { "x-farhop-console": "1", "content-type": "application/json" }, body: JSON.stringify(body) };
  let answer;
  try { answer = await fetch("/console/of/" + path, { credentials: "same-origin", ...init }); }
  catch { throw new Error("this console cannot be reached now"); }
  const reply = await answer.json().catch(() => ({}));
  if (answer.status === 401 && path !== "login") login();
  if (!answer.ok) throw new Error(reply.error || "status " + answer.status);
  return reply;
}

function apply(old, patch) {
  const made = { ...old };
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete made[key];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const was = made[key];
      made[key] = apply(was && typeof was === "object" && !Array.isArray(was) ? was : {}, value);
    } else made[key] = value;
  }
  return made;
}

let source = null;
function listen() {
  if (source) source.close();
  source = new EventSource("/console/of/events");
  const take = (make) => (event) => {
    now = make(JSON.parse(event.data));
    lastHeard = performance.now();
    skew = now.at - Date.now();
    if (past === null) { shown = now; drawOn(); }
    tick();
  };
  source.addEventListener("picture", take((picture) => picture));
  source.addEventListener("patch", take((patch) => apply(now, patch)));
}
setInterval(tick, 1000);
// A browser has six connections to an origin: a page that it only keeps for the way back, or that nobody sees, holds none.
const HIDDEN_MS = 30000;
const unlisten = () => { if (source) source.close(); source = null; };
addEventListener("pagehide", unlisten);
addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(unlisten, HIDDEN_MS);
  else if (!source && me.may && me.may !== "metrics") listen();
});

function tick() {
  const away = lastHeard && performance.now() - lastHeard > 3500;
  if (source && source.readyState === 2 && !$("login").open) setTimeout(() => source.readyState === 2 && listen(), 1000);
  document.body.classList.toggle("away", Boolean(away));
  document.body.classList.toggle("past", past !== null);
  const at = past ?? now.at, s = Math.round((performance.now() - lastHeard) / 1000);
  $("moment").textContent = away && past === null ? `silent for ${s} s: this is ${clock(at)}` : past !== null ? archive ? new Date(at).toLocaleString([], { hour12: false }) : `${clock(at)}, ${Math.max(0, Math.round((now.at - at) / 1000))} s ago` : clock(at);
  const scrub = $("scrub");
  scrub.min = times()[0]?.from_ms || now.at || 0; scrub.max = latest() || 0;
  if (past === null) scrub.value = now.at || 0;
  scrub.setAttribute("aria-valuetext", clock(at));
}

// -- who

async function who() {
  me = await ask("me");
  $("source").textContent = me.source;
  const at = clear($("me"));
  put(at, "span", {}, `${me.may ? me.name : "nobody"} · ${me.acts ? "may act" : me.may ? "may read" : "may nothing"}`);
  if (me.asks && me.may) put(at, "button", { onclick: async () => { await ask("logout", {}); location.reload(); } }, "Log out");
  if (me.may === "" || me.may === "metrics") login(); else { listen(); loadPast(); }
}

function login() { if (!$("login").open) { $("login").showModal(); $("token").focus(); } }
$("login").addEventListener("cancel", (event) => event.preventDefault());
$("login").querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try { await enter($("token").value); $("token").value = ""; $("login").close(); }
  catch (error) { $("login").querySelector(".error").textContent = error.message; }
});
async function enter(token) { await ask("login", { token }); await who(); }

// -- drawing

const regionOf = (name) => (shown.balancers?.[name] || {}).region;
const cut = (region) => Boolean(region.cut_off && region.cut_off.length);
const age = (ms) => { if (!ms) return "never"; const s = Math.max(0, Math.round(((shown.at || 0) - ms) / 1000)); return s < 2 ? "now" : s < 100 ? s + " s ago" : Math.round(s / 60) + " min ago"; };
const VIEWS = { world: drawWorld, region: drawRegion, request: drawRequest, law: drawLaw, drills: drawDrills };
let view = "world";

function* drawing() {
  drawWrong();
  options($("tenant"), Object.keys(shown.law?.tenants || {}), "no tenant");
  yield;
  yield* VIEWS[view]() || [];
}
let steps = null, again = false;
function draw() {
  steps = null;
  if (shown.at) for (const _ of drawing());
}
// Each second's picture in pieces, a few ms a frame; one that comes meanwhile is drawn after it.
const FRAME_MS = 1;
function drawOn() {
  if (steps) { again = true; return; }
  const mine = steps = drawing();
  const step = () => {
    if (steps !== mine) return;
    const until = performance.now() + FRAME_MS;
    let done;
    do done = mine.next().done; while (!done && performance.now() < until);
    if (!done) { requestAnimationFrame(step); return; }
    steps = null;
    if (again) { again = false; drawOn(); }
  };
  requestAnimationFrame(() => requestAnimationFrame(step));  // what came took its share of this frame
}

function show() {
  const [name, arg] = decodeURIComponent(location.hash.slice(1)).split("/");
  view = VIEWS[name] ? name : "world";
  if (view === "region" && arg) which = arg;
  if (view === "request" && arg) { selected = arg; explainPast(); }
  for (const one of Object.keys(VIEWS)) $(one).hidden = one !== view;
  for (const link of document.querySelectorAll("#tabs a")) link.hash === "#" + view ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  $("view").scrollTop = 0;
  document.title = `Farhop · ${view}`;
  if (view === "drills") { loadDrills(); loadOffered(); }
  if (view === "law") loadLaws();
  draw();
}
addEventListener("hashchange", show);

function drawWrong() {
  const wrong = (shown.wrong || []).map((one) => [SIGN[one.state] || "✕", "s-" + (one.state === "cut off" ? "cut" : one.state), one.subject, one.what + (one.seen_at ? `, last seen ${age(one.seen_at)}` : "")]);
  if (runs.running) wrong.push(["▽", "s-draining", "drill", `${runs.running.drill} runs, by ${runs.running.author}`]);
  const at = $("wrong"), text = JSON.stringify(wrong);
  if (at.dataset.is === text) return;
  at.dataset.is = text;
  clear(at);
  if (!wrong.length) {
    const n = Object.values(shown.regions || {}).length, answering = Object.values(shown.balancers || {}).length;
    put(at, "p", { class: "fine" }, el("span", { class: "s-up" }, "●"), `Nothing is wrong: ${n} region${n === 1 ? "" : "s"} up, ${answering} balancer${answering === 1 ? "" : "s"} seen, one law.`);
  }
  for (const [sign, cls, name, why] of wrong) put(at, "p", {}, el("span", { class: cls, "aria-hidden": "true" }, sign), el("b", {}, name), el("span", {}, why));
}
// World

function at(name) {
  const place = (shown.law?.places || {})[name];
  return place ? [360 + place.lon * 2, 180 - place.lat * 2] : null;
}

function box(points) {
  // The whole world, but for the poles; where all is in one part of it, that part.
  const whole = [0, 8, 720, 300];
  if (points.length < 2) return whole;
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]), pad = 60;
  const x = Math.min(...xs) - pad, y = Math.min(...ys) - pad, w = Math.max(...xs) + pad - x, h = Math.max(...ys) + pad - y;
  const W = Math.max(w, h * 2.4, 200), H = W / 2.4;
  if (W >= 640) return whole;
  return [Math.max(0, Math.min(720 - W, x - (W - w) / 2)), Math.max(8, Math.min(308 - H, y - (H - h) / 2)), W, H];
}

let mapped = "";
function* drawWorld() {
  const map = $("map"), regions = Object.entries(shown.regions || {}), places = Object.keys(shown.law?.places || {});
  const frame = box(places.map(at).filter(Boolean));
  const signature = JSON.stringify([places, Boolean(coast)]);
  if (mapped !== signature) {
    mapped = signature;
    clear(map).setAttribute("viewBox", frame.join(" "));
    if (coast) put(map, "path", { class: "coast", d: coast });
    put(map, "g", { id: "flows" });
    put(map, "g", { id: "places" });
    map.dataset.scale = frame[2] / 720;
  }
  const scale = Math.max(0.55, frame[2] / 720), lawful = tenant ? new Set(shown.law?.tenants?.[tenant]?.processing || []) : null;
  const most = Math.max(1, ...regions.map(([, one]) => one.slots || one.slots_free || 0));
  map.classList.toggle("crowded", regions.length > 24);
  const places_ = $("places"), had = new Map([...places_.children].map((one) => [one.dataset.region, one]));
  let drawn = 0;
  for (const [name, one] of regions) {
    const p = at(name);
    if (!p) continue;
    if (++drawn % PIECE === 0) yield;
    const size = one.slots || one.slots_free || 0, r = (6 + 9 * Math.sqrt(size / most)) * scale * Math.min(1, Math.sqrt(20 / regions.length)), used = Math.min(1, one.used ?? 0);
    const group = had.get(name) || put(places_, "g", { tabindex: 0, role: "link", onclick: () => { location.hash = "region/" + encodeURIComponent(name); }, onkeydown: (event) => { if (event.key === "Enter") location.hash = "region/" + encodeURIComponent(name); } });
    had.delete(name);
    group.dataset.region = name;
    group.setAttribute("class", `place ${one.state} ${cut(one) ? "cut" : ""} ${lawful ? lawful.has(name) ? "inside" : "outside" : ""}`);
    group.setAttribute("aria-label", `${name}: ${one.state}${cut(one) ? ", its own balancer is cut off" : ""}, ${pct(one.used)} used, ${one.queued ?? "unknown"} wait`);
    const kept = document.activeElement === group;
    clear(group);
    put(group, "title", {}, `${name}: ${one.state}\n${one.why || ""}`);
    put(group, "circle", { class: "zone", cx: p[0], cy: p[1], r: r * 1.9 });
    put(group, "circle", { class: "halo", cx: p[0], cy: p[1], r: r * 1.45 });
    put(group, "circle", { class: "body", cx: p[0], cy: p[1], r });
    if (used > 0) put(group, "path", { class: "level", d: level(p[0], p[1], r, used) });
    put(group, "circle", { class: "ringed", cx: p[0], cy: p[1], r, "stroke-width": 2.2 * scale });
    const sign = one.state === "up" ? cut(one) ? "⌁" : "" : SIGN[one.state] || "";
    if (sign) put(group, "text", { class: "sign", x: p[0], y: p[1] + 4 * scale, "font-size": 11 * scale }, sign);
    put(group, "text", { x: p[0], y: p[1] + r + 12 * scale }, name);
    const line = cut(one) ? `silent, ${age(one.seen_at)}` : one.state === "up" ? `${pct(one.used)} used${one.queued ? `, ${one.queued} wait` : ""}` : one.state;
    put(group, "text", { class: "sub", x: p[0], y: p[1] + r + 21.5 * scale }, line);
    if (kept) group.focus();
  }
  for (const gone of had.values()) gone.remove();
  yield;
  const flows = $("flows"), lines = new Map([...flows.children].map((one) => [one.dataset.key, one])), moving = [];
  let bent = 0;
  for (const [key, flow] of Object.entries(shown.arcs || {})) {
    const [from, to] = key.split(">"), a = at(from), b = at(to);
    if (!a || !b || from === to) continue;
    if (++bent % PIECE === 0) yield;
    const mid = [(a[0] + b[0]) / 2, Math.min(a[1], b[1]) - Math.abs(a[0] - b[0]) * 0.16 - 6];
    const line = (cls, rate, dashed = "") => {
      if (!rate) return;
      const line = lines.get(key + cls) || put(flows, "path", { "data-key": key + cls, d: `M${a} Q${mid} ${b}` });
      lines.delete(key + cls);
      set(line, "class", `flow ${cls}${dashed}`);
      set(line, "stroke-width", (0.7 + Math.min(5, Math.log2(1 + rate) * 0.8)) * scale);
      moving.push({ a, mid, b, rate, cls: cls + dashed });
    };
    line("", flow.ok, flow.spilled ? "spill" : ""); line("bad", flow.failed); line("refused", flow.refused);
  }
  for (const gone of lines.values()) gone.remove();
  paths = moving;
  const into = {};
  for (const [key, flow] of Object.entries(shown.arcs || {})) into[key.split(">")[1]] = (into[key.split(">")[1]] || 0) + Object.entries(flow).reduce((sum, [how, n]) => how === "spilled" ? sum : sum + n, 0);
  yield;
  yield* rowsInPieces("regions", regions, ([name]) => name, ([name, one]) => [
    name, state(one.state, cut(one) ? " ⌁" : ""), [pct(one.used), "n"], [one.busy === undefined ? "–" : `${one.busy}/${one.slots}`, "n"], [num(one.queued), "n"], [num(one.wait_ms, 0, " ms"), "n"],
    [name in into ? num(into[name], 1) : "–", "n"], [age(one.seen_at), "n"],
  ], { open: (name) => { location.hash = "region/" + encodeURIComponent(name); }, stale: ([, one]) => cut(one) });
  yield;
  yield* rowsInPieces("arcs", Object.entries(shown.arcs || {}), ([key]) => key, ([key, flow]) => { const [from, to] = key.split(">"); return [from, to, [num(flow.ok, 1), "n"], [num(flow.failed, 1), "n"], [num(flow.refused, 1), "n"], [num(flow.spilled, 1), "n"]]; }, { none: "no request in the last second" });
  yield;
  yield* drawDecisions($("world").querySelector(".decisions"));
  yield;
  drawZone(lawful);
}

function level(x, y, r, used) {
  // A vessel filled from below: the chord at a height, and the arc under it.
  if (used >= 0.999) return `M${x - r} ${y} a${r} ${r} 0 1 0 ${2 * r} 0 a${r} ${r} 0 1 0 ${-2 * r} 0`;
  const top = y + r - 2 * r * used, half = Math.sqrt(Math.max(0, r * r - (top - y) ** 2));
  return `M${x - half} ${top} A${r} ${r} 0 ${used > 0.5 ? 1 : 0} 0 ${x + half} ${top} Z`;
}

function drawZone(lawful) {
  const zone = $("zone");
  zone.hidden = !lawful;
  if (!lawful) return;
  const law = shown.law, went = {};
  for (const one of Object.values(shown.decisions || {})) if (one.tenant === tenant && one.to) went[one.to] = (went[one.to] || 0) + 1;
  const lines = [`${tenant} may be computed in ${[...lawful].join(", ") || "no region"}; of its last decisions: ${Object.entries(went).map(([to, n]) => `${n} to ${to}`).join(", ") || "none seen"}.`];
  for (const [region, why] of Object.entries(law?.excluded?.[tenant] || {})) lines.push(`not ${region}: ${why}`);
  clear(zone).append(...lines.map((line) => el("p", {}, line)));
}

function* drawDecisions(table) {
  const list = Object.entries(shown.decisions || {}).filter(([, one]) => !tenant || view !== "world" || one.tenant === tenant).sort((a, b) => (b[1].at || 0) - (a[1].at || 0));
  yield* rowsInPieces(table, list, ([id]) => id, ([, one]) => [
    clock(one.at), one.tenant || "–", one.from || "–", one.to || "–",
    el("span", { class: one.outcome === "served" ? "s-up" : "s-down" }, (one.outcome === "served" ? "● " : "✕ ") + (one.outcome || "–") + (one.tries > 1 ? `, try ${one.tries}` : "") + (one.spilled ? ", spilled" : "")),
    [num(one.ttft_ms, 0, " ms"), "n"],
  ], { open: (id) => { location.hash = "request/" + id; }, chosen: (id) => id === selected, none: "no decision is shown: no traffic, or kept from here by law" });
}

// Particles: how dense they are is the rate. None where motion is to be reduced, or nobody looks.
let paths = [], dots = [];
function animate(time) {
  requestAnimationFrame(animate);
  const canvas = $("flow"), map = $("map");
  if (view !== "world" || calm.matches || document.hidden || past !== null) { if (dots.length) { dots = []; canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height); } return; }
  const w = map.clientWidth, h = map.clientHeight;
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; canvas.style.width = w + "px"; canvas.style.height = h + "px"; }
  const matrix = map.getScreenCTM(), origin = map.getBoundingClientRect();
  if (!matrix) return;
  const g = canvas.getContext("2d"), colours = getComputedStyle(document.documentElement);
  g.clearRect(0, 0, w, h);
  for (const path of paths) if (dots.length < 300 && Math.random() < Math.min(0.5, path.rate / 60)) dots.push({ path, from: time });
  dots = dots.filter((one) => time - one.from < 1400);
  for (const { path, from } of dots) {
    const t = (time - from) / 1400, u = 1 - t, { a, mid, b } = path;
    const x = u * u * a[0] + 2 * u * t * mid[0] + t * t * b[0], y = u * u * a[1] + 2 * u * t * mid[1] + t * t * b[1];
    g.fillStyle = colours.getPropertyValue(path.cls === "bad" ? "--bad" : path.cls ? "--warn" : "--ok");
    g.beginPath();
    g.arc(x * matrix.a + matrix.e - origin.left, y * matrix.d + matrix.f - origin.top, 2.1, 0, 7);
    g.fill();
  }
}

// Region

function* drawRegion() {
  const names = Object.keys(shown.regions || {});
  options($("which"), names);
  if (!names.includes(which)) which = names[0] || "";
  $("which").value = which;
  const one = (shown.regions || {})[which];
  if (!one) return;
  const place = shown.law?.places?.[which] || {};
  clear($("region-state")).append(state(one.state), ` ${one.why || ""}${place.city ? ` · ${place.city}, ${place.country}` : ""}`);
  const may = me.acts && past === null, biased = Boolean(shown.overrides?.["bias " + which]);
  same($("region-acts"), [which, may, Boolean(one.drain), biased], (acts) => {
    if (!may) return;
    const region = which, button = (text, does) => put(acts, "button", { onclick: () => act(does, region) }, text);
    if (one.drain) button("Undrain…", "undrain"); else button("Drain…", "drain");
    button("Bias…", "bias");
    if (biased) button("Take the bias back…", "unbias");
    button("Split…", "split"); button("Take a split back…", "unsplit");
  });
  const facts = { used: pct(one.used), busy: one.busy === undefined ? "–" : `${one.busy} of ${one.slots}`, waiting: num(one.queued), wait: num(one.wait_ms, 0, " ms"), "round trip": num(one.rtt_ms, 1, " ms"), admitted: pct(one.admitted), replicas: one.replicas_all === undefined ? num(one.replicas) : `${one.replicas_up} of ${one.replicas_all} up`, "prefix nodes": num(one.prefix_nodes), "last seen": age(one.seen_at) };
  if (one.drain) facts["drained by"] = `${one.drain.author}: ${one.drain.why}`;
  if (one.pilot) facts["pilot light"] = one.pilot;
  clear($("region-facts")).append(...Object.entries(facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  const mine = Object.entries(shown.balancers || {}).filter(([, b]) => b.region === which);
  const list = mine.flatMap(([key, b]) => Object.entries(shown.replicas?.[key] || {}).map(([name, r]) => ({ key: key + " " + name, name, r, fresh: b.fresh })));
  yield;
  yield* rowsInPieces("replicas", list, (item) => item.key, ({ name, r }) => [
    name, state(r.state), gauge(r.slots ? (r.in_flight + (r.elsewhere || 0)) / r.slots : undefined, "load"), [num(r.in_flight), "n"], [num(r.slots), "n"], [num(r.running), "n"], [num(r.waiting), "n"], gauge(r.kv, "KV used"), [pct(r.hit), "n"], [num(r.tpot_ms, 1), "n"],
    [r.share === undefined ? "all" : pct(r.share), "n"], [r.age_s === undefined ? "–" : r.age_s + " s", "n"], r.version || "–",
    [[r.why, r.slow, r.share < 1 ? `reduced to ${pct(r.share)} of its capacity` : "", r.until_s && r.state !== "up" ? `for ${r.until_s} s more` : ""].filter(Boolean).join("; "), "long"],
  ], { stale: (item) => item.fresh === "cut off", none: mine.some(([, b]) => b.tier === "regional") ? "no replica is known" : "its own balancer is not asked from here: `farhop console` asks all" });
  const queue = mine.flatMap(([key]) => Object.entries(shown.queues?.[key] || {}).map(([line, n]) => ({ key: key + line, band: line.slice(0, line.indexOf(" ")), tenant: line.slice(line.indexOf(" ") + 1), n })));
  rows("queue", queue, (q) => q.key, (q) => [q.band, q.tenant, [q.n, "n"]], { none: "nobody waits" });
  rows("own", mine, ([key]) => key, ([key, b]) => [key, fresh(b), [num(b.under_way), "n"], [num(b.epoch), "n"], [num(b.prefix_nodes), "n"], [b.error || b.trouble || "", "long"]], { stale: ([, b]) => b.fresh === "cut off", none: "none is asked from here" });
}
const fresh = (b) => el("span", { class: b.fresh === "fresh" ? "s-up" : b.fresh === "late" ? "s-late" : "s-cut" }, `${b.fresh === "fresh" ? "●" : b.fresh === "late" ? "◐" : "✕"} ${b.fresh === "fresh" ? "" : b.fresh + ", "}${age(b.seen_at)}`);
$("which").addEventListener("change", () => { location.hash = "region/" + encodeURIComponent($("which").value); });

// Request

function* drawRequest() {
  yield* drawDecisions($("request").querySelector(".decisions"));
  options($("ask-tenant"), Object.keys(shown.law?.tenants || {}));
  options($("ask-model"), [...new Set(Object.values(shown.regions || {}).flatMap((one) => one.models || []))]);
}
$("find").addEventListener("submit", (event) => { event.preventDefault(); const id = $("decision").value.trim(); if (id) { selected = ""; location.hash = "request/" + encodeURIComponent(id); show(); } });
$("ask").addEventListener("submit", (event) => { event.preventDefault(); explainNow(""); });

async function explainNow(drained) {
  const question = { body: { model: $("ask-model").value, messages: [{ role: "user", content: $("ask-text").value }] }, tenant: $("ask-tenant").value };
  try {
    const reply = await ask("explain", { question, drained });
    const why = clear($("why"));
    put(why, "h3", {}, `Where ${question.tenant}'s request would go now`);
    for (const [name, one] of Object.entries(reply.explained)) reasons(why, name, one, reply.what_if?.[name], explainNow);
  } catch (error) { failed($("why"), error); }
}
async function explainPast(drained = "") {
  $("decision").value = selected;
  try {
    const reply = await ask(`decision/${encodeURIComponent(selected)}?drained=${encodeURIComponent(drained)}`), why = clear($("why"));
    const records = Object.entries(reply.records), first = records[0][1];
    put(why, "h3", {}, `${first.tenant} · ${first.model}`);
    put(why, "p", {}, el("span", { class: "id" }, selected), ` · ${clock(first.at_unix_ms)} · ${first.outcome} (${first.status})`);
    waterfall(why, records);
    for (const [name, one] of records) reasons(why, name, one, reply.what_if?.[name], explainPast);
  } catch (error) { failed($("why"), error); }
}
const failed = (element, error) => put(clear(element), "p", { class: "error", role: "alert" }, error.message);

function waterfall(element, records) {
  const from = Math.min(...records.map(([, one]) => one.at_unix_ms)), to = Math.max(from + 1, ...records.map(([, one]) => one.at_unix_ms + one.duration_ms));
  put(element, "h2", {}, "How it went");
  const W = 640, left = 130, at_ = (ms) => left + (ms - from) / (to - from) * (W - left - 8), high = 10 + records.length * 26;
  const svg = put(element, "svg", { class: "fall", viewBox: `0 0 ${W} ${high}`, role: "img", "aria-label": "Waterfall; the table under it says the same" });
  records.forEach(([name, one], i) => {
    const y = 6 + i * 26, x = at_(one.at_unix_ms), end = at_(one.at_unix_ms + one.duration_ms), mid = one.ttft_ms === null ? x : Math.min(end, at_(one.at_unix_ms + one.ttft_ms));
    put(svg, "text", { x: 0, y: y + 12 }, name.length > 22 ? name.slice(0, 21) + "…" : name);
    put(svg, "rect", { class: "track", x: left, y, width: W - left - 8, height: 16, rx: 3 });
    put(svg, "rect", { class: "ttft", x, y, width: Math.max(2, mid - x), height: 16, rx: 3 });
    put(svg, "rect", { class: "rest", x: mid, y, width: Math.max(1, end - mid), height: 16, rx: 3 });
  });
  const table = grid(element, ["balancer", "n:began", "n:first token", "n:whole", "attempts", "n:prompt", "n:cached", "n:answer"]);
  rows(table, records, ([name]) => name, ([name, one]) => [name, [`+${Math.round(one.at_unix_ms - from)} ms`, "n"], [num(one.ttft_ms, 0, " ms"), "n"], [num(one.duration_ms, 0, " ms"), "n"], (one.attempts || []).map((a) => `${a.target}: ${a.outcome}`).join(", ") || "none", [num(one.usage?.prompt_tokens), "n"], [num(one.usage?.cached_tokens), "n"], [num(one.usage?.completion_tokens), "n"]]);
}
function grid(element, heads) {
  const table = put(put(element, "div", { class: "scroll" }), "table");
  const row = put(put(table, "thead"), "tr");
  for (const head of heads) put(row, "th", { class: head.startsWith("n:") ? "n" : "" }, head.replace(/^n:/, ""));
  put(table, "tbody");
  return table;
}

function reasons(element, name, record, whatIf, again) {
  const why = record.reasons;
  put(element, "h2", {}, `${name}: why`);
  if (record.unlawful) put(element, "p", { class: "error" }, record.unlawful);
  if (!why) { put(element, "p", { class: "hint" }, "it says no reasons"); return; }
  const named = (why.candidates || []).some((one) => "region" in one) ? "region" : "replica", unit = why.unit || "";
  put(element, "p", { class: "hint" }, `policy ${why.policy || "–"}${why.law_epoch !== undefined ? `, law epoch ${why.law_epoch}` : ""}${why.spilled_from ? `, spilled from ${why.spilled_from}` : ""}${(why.notes || []).length ? ": " + why.notes.join("; ") : ""}`);
  const list = [...(why.candidates || [])].sort((a, b) => a.score - b.score), most = Math.max(1e-9, ...list.map((one) => Math.abs(one.score)));
  const table = grid(element, [named, "", `n:score ${unit}`, "n:first token", "n:round trip", "n:wait", "n:prefill", "n:cached tokens", "what it is made of"]);
  rows(table, list, (one) => one[named], (one) => {
    const bar = el("span", { class: "hbar" + (one[named] === why.chosen ? " chosen" : "") });
    bar.style.width = Math.max(2, 74 * Math.abs(one.score) / most) + "px";
    return [el("span", { class: one[named] === why.chosen ? "s-up" : "" }, (one[named] === why.chosen ? "● " : "") + one[named] + (one.hot ? " (hot)" : one.full ? " (full)" : "")), bar, [num(one.score, 1), "n"], [num(one.ttft_ms, 0, " ms"), "n"], [num(one.rtt_ms, 1), "n"], [num(one.wait_ms ?? one.delay_ms, 0), "n"], [num(one.prefill_ms, 0), "n"], [num(one.hit_tokens), "n"], [Object.entries(one.terms_ms || {}).filter(([, ms]) => Math.abs(ms) >= 0.05).map(([term, ms]) => `${term} ${num(ms, 1)}`).join(", "), "long"]];
  }, { none: "no candidate" });
  for (const one of list) table.querySelector(`tr[data-key="${CSS.escape(one[named])}"] .hbar`)?.style.setProperty("width", Math.max(2, 74 * Math.abs(one.score) / most) + "px");
  const out = [...Object.entries(why.unlawful || {}).map(([r, text]) => [r, "✕ by law", text]), ...Object.entries(why.not_serving || {}).map(([r, text]) => [r, "◐ not serving", text])];
  if (out.length) {
    put(element, "h2", {}, "Not asked");
    rows(grid(element, [named, "", "clause or reason"]), out, ([r]) => r, ([r, kind, text]) => [r, el("span", { class: kind.startsWith("✕") ? "s-down" : "s-late" }, kind), [text, "long"]]);
  }
  const bar = put(element, "div", { class: "whatif" }, el("span", { class: "hint" }, "Had this been drained:"));
  for (const one of list) put(bar, "button", { onclick: () => again(one[named]), "aria-pressed": String(whatIf?.drained === one[named]) }, one[named]);
  if (whatIf) put(bar, "strong", { class: whatIf.chosen ? "" : "s-down" }, whatIf.chosen ? whatIf.moved ? `→ ${whatIf.chosen}, first token ${num(whatIf.ttft_ms, 0, " ms")} instead of ${num(whatIf.was_ttft_ms, 0, " ms")}${whatIf.asked ? "" : " (by the scores then)"}` : `→ ${whatIf.chosen}, as it was` : "→ refused: nobody else was lawful and served");
}

// Law

function drawLaw() {
  const law = shown.law || {}, tenants = Object.entries(law.tenants || {}), places = Object.keys(law.places || {});
  options($("scope"), tenants.length ? Object.keys(tenants[0][1]).sort((a, b) => (b === "processing") - (a === "processing")) : []);
  const scope = $("scope").value || "processing";
  const newest = Object.values(shown.balancers || {}).filter((b) => b.epoch === law.epoch).map((b) => b.law || {}).find((one) => one.author) || {};
  $("law-by").textContent = `epoch ${law.epoch ?? "–"}${newest.author ? `, by ${newest.author}${newest.at ? " at " + newest.at : ""}: ${newest.why || ""}` : ", as the topology has it"}${newest.signed_by ? `; signed by ${newest.signed_by}` : ""}`;
  const head = $("matrix").tHead, names = JSON.stringify(places);
  if (head.dataset.is !== names) { head.dataset.is = names; clear(head).append(el("tr", {}, el("th", {}, "tenant"), ...places.map((name) => el("th", {}, name)))); }
  rows("matrix", tenants, ([name]) => name, ([name, scopes]) => [name, ...places.map((place) => (scopes[scope] || []).includes(place) ? ["✓ may", "y"] : ["– not", "x"])]);
  for (const row of $("matrix").tBodies[0].rows) places.forEach((place, i) => { const why = law.excluded?.[row.dataset.key]?.[place]; if (row.cells[i + 1]) row.cells[i + 1].title = scope === "processing" && why ? why : ""; });
  rows("epochs", Object.entries(shown.balancers || {}), ([key]) => key, ([key, b]) => [key, [el("span", { class: b.epoch === law.epoch ? "" : "s-late" }, (b.epoch === law.epoch ? "" : "◐ ") + (b.epoch ?? "–")), "n"], b.law?.source || "–", b.law?.author || "–", [[b.law?.why, b.law?.etcd_out_of_reach && "etcd out of reach", ...(b.law?.trouble || [])].filter(Boolean).join("; ") || "–", "long"], fresh(b)], { stale: ([, b]) => b.fresh === "cut off" });
  const drains = Object.entries(shown.regions || {}).filter(([, one]) => one.drain).map(([name, one]) => ({ key: "drain " + name, text: `drain ${name}`, name, undo: "undrain", ...one.drain }));
  const others = Object.entries(shown.overrides || {}).map(([key, one]) => ({ key, text: one.action === "bias" ? `bias ${one.region} ${num(one.ms, 0, " ms")}` : `pin ${one.tenant || one.model} to ${one.region}`, name: one.region, undo: one.action === "bias" ? "unbias" : "", ...one }));
  rows("overrides", [...drains, ...others], (one) => one.key, (one) => [one.text, one.author || "–", [one.why || "", "long"], one.until ? clock(Date.parse(one.until)) : "–", me.acts && one.undo && past === null ? el("button", { onclick: () => act(one.undo, one.name) }, "Take back…") : ""], { none: "nothing is drained, biased or pinned" });
}
async function loadLaws() {
  let laws = [];
  try { laws = (await ask("laws")).laws; } catch { /* what stands in etcd is beside what balancers go by */ }
  rows("laws", laws, (one) => String(one.epoch), (one) => [[one.epoch ?? "–", "n"], one.at || "–", one.author || "–", [one.why || "–", "long"], [one.moved ? one.moved.join("; ") + (one.more ? ` and ${one.more} more` : "") || "nothing" : "–", "long"]], { none: "no law was ever set, or this port does not tell of them: balancers go by their topology" });
}
$("scope").addEventListener("change", draw);

// Drills

async function loadDrills() {
  try { runs = await ask("drills"); drawDrills(); drawWrong(); } catch (error) { failed($("running"), error); }
}
setInterval(() => { if (view === "drills" && !document.hidden && me.may && me.may !== "metrics") loadDrills(); }, 1000);
function drawDrills() {
  const run = runs.running;
  same($("running"), [run, runs.lever, me.acts], (at_) => {
    if (run) {
      put(at_, "p", {}, state("draining", ""), ` ${run.drill} (${run.run}) runs since ${clock(run.since_s * 1000)}, by ${run.author} `);
      if (me.acts) put(at_, "button", { class: "danger", onclick: () => act("stop-drill", run.run) }, "Stop it…");
    } else put(at_, "p", { class: "hint" }, "No drill runs.");
    if (runs.lever) put(at_, "p", { class: "error" }, `The emergency stop is engaged by ${runs.lever.author}: ${runs.lever.why}. No drill begins.`);
  });
  drawGoing(runs.going);
  rows("history", runs.history || [], (one) => one.run, (one) => [new Date(one.began_s * 1000).toLocaleString([], { hour12: false }), one.drill, verdict(one.verdict), [num(one.took_s, 0, " s"), "n"], one.author, [one.why || "", "long"], mayReplay(one.run, one.began_s) ? el("button", { onclick: (event) => { event.stopPropagation(); replay(one.run, one.began_s * 1000); } }, "Replay") : ""], { none: "no drill has run, or its record is elsewhere", open: report });
  rows("planned", runs.planned || [], (one) => one.drill, (one) => [one.drill, Object.entries(one).filter(([k]) => k !== "drill").map(([k, v]) => `${k} ${typeof v === "object" ? JSON.stringify(v) : v}`).join(", ")], { none: "nothing is planned" });
}
const verdict = (one) => el("span", { class: one === "PASS" ? "s-up" : one === "FAIL" ? "s-down" : "s-late" }, (one === "PASS" ? "● " : one === "FAIL" ? "✕ " : "◐ ") + one);
// Of a run that was begun here: each phase as it comes, and what the canaries see.
function drawGoing(going) {
  $("going").hidden = !going;
  if (!going) return;
  $("going-title").textContent = `${going.title}${going.run ? ` (${going.run})` : ""}`;
  const text = going.verdict || `${going.phase}, by ${going.author}${going.why ? `: ${going.why}` : ""}`;
  same($("going-state"), [text, going.ended], (at_) => {
    at_.append(going.verdict ? verdict(going.verdict) : state("draining", ""), ` ${going.verdict ? going.ended : text}`);
    for (const one of going.blocked || []) put(at_, "span", { class: "strands" }, one);
  });
  const lines = going.lines.map(([at_s, line], i) => [String(i), at_s, line]);
  rows("going-lines", lines, ([i]) => i, ([, at_s, line]) => [[num(at_s, 1, " s"), "n"], [line, "long"]], { none: "its checks are made" });
  const live = [["canaries sent", going.canaries], ["of these failed", going.failed], ["seconds since it began, of about " + num(going.planned_s), going.at_s], ...Object.entries(going.live)];
  rows("going-live", live, ([name]) => name, ([name, value]) => [name, [num(value, Number.isInteger(value) ? 0 : 2), "n"]]);
  const whole = going.verdict && going.run in (runs.reports || {});
  same($("going-report"), [going.run, whole], (at_) => { if (whole) reportLinks(at_, going.run, going.began_s); });
}
function reportLinks(at_, run, began_s) {
  if (run in (runs.reports || {})) put(at_, "a", { href: `/console/of/drills/${encodeURIComponent(run)}/report`, target: "_blank", rel: "noopener" }, "The whole report, with its timeline");
  if (mayReplay(run, began_s)) put(at_, "button", { onclick: () => replay(run, began_s * 1000) }, "Replay it from its beginning");
}
const mayReplay = (run, began_s) => inLastHour(began_s * 1000) || runs.reports?.[run];
async function loadOffered() {
  let why = "";
  try { const reply = await ask("drills/offered"); offered = reply.offered; why = reply.why; } catch (error) { offered = []; why = error.message; }
  if (!why && !me.acts) why = "To begin one needs the right to act.";
  $("begin").hidden = Boolean(why) || !offered.length;
  $("begin-about").textContent = why || (offered.length ? "First its plan and the safety checks are shown; nothing is touched before you confirm by its name. It ends with this console." : "no drill is known here");
  options($("begin-drill"), offered.map((one) => one.drill));
  drawBegin();
}
function drawBegin() {
  const one = offered.find((each) => each.drill === $("begin-drill").value);
  if (!one) return;
  same($("begin-values"), one, (at_) => { for (const [name, value] of Object.entries(one.parameters)) put(at_, "label", {}, name + " ", el("input", { name, value, size: 12, maxlength: 256, autocomplete: "off", spellcheck: "false" })); });
  $("begin-about").textContent = `${one.title} (${one.kind}, ${one.from}). First its plan and the safety checks are shown; nothing is touched before you confirm by its name. It ends with this console.`;
}
$("begin-drill").addEventListener("change", drawBegin);
$("begin").addEventListener("submit", (event) => {
  event.preventDefault();
  act("start-drill", $("begin-drill").value, Object.fromEntries([...$("begin-values").querySelectorAll("input")].map((one) => [one.name, one.value])));
});
function report(run) {
  const one = (runs.history || []).find((each) => each.run === run);
  if (!one) return;
  const at_ = clear($("report"));
  put(at_, "h2", { tabindex: -1 }, `Report of ${one.run}: ${one.title || one.drill}`).focus();
  put(at_, "p", {}, verdict(one.verdict), one.why ? ` ${one.why}` : "");
  reportLinks(put(at_, "p", { class: "bar" }), one.run, one.began_s);
  rows(grid(at_, ["measure", "n:value"]), Object.entries(one.measures || {}), ([name]) => name, ([name, value]) => [name, [num(value, 3), "n"]]);
  if ((one.hypotheses || []).length) rows(grid(at_, ["hypothesis", "what came of it"]), one.hypotheses.map((h, i) => [String(i), h]), ([i]) => i, ([, h]) => [[h.says || h.name || h.hypothesis || "", "long"], [Object.entries(h).filter(([k]) => !["says", "name", "hypothesis"].includes(k)).map(([k, v]) => `${k} ${v}`).join(", "), "long"]]);
}

// -- acting

const ACTS = {
  drain: ["Drain", [["why", "Why", "text", ""], ["for", "For how many minutes", "number", 30], ["over", "Over how many seconds", "number", 0]]],
  undrain: ["Take back the drain of", [["why", "Why", "text", ""]]],
  bias: ["Bias", [["why", "Why", "text", ""], ["for", "For how many minutes", "number", 30], ["ms", "Milliseconds worse (below 0: better)", "number", 50]]],
  unbias: ["Take back the bias of", [["why", "Why", "text", ""]]],
  split: ["Split a model's traffic in", [["model", "Model", "text", ""], ["weights", "Each version's share, such as v1=95,v2=5", "text", ""], ["why", "Why", "text", ""]]],
  unsplit: ["Take back a split in", [["model", "Model", "text", ""], ["why", "Why", "text", ""]]],
  "start-drill": ["Begin drill", [["why", "Why", "text", ""]]],
  "stop-drill": ["Stop drill", [["why", "Why", "text", ""]]],
};
let doing = null;
function act(does, target, values) {
  const [title, fields] = ACTS[does];
  doing = { do: does, target, values, shown: null, opener: document.activeElement };
  $("act-title").textContent = `${title} ${target}`;
  const at_ = clear($("act-fields"));
  for (const [name, label, type, value] of fields) put(at_, "label", {}, label + " ", el("input", { id: "act-" + name, type, value, required: true, maxlength: 256, step: "any", autocomplete: "off" }));
  put(at_, "p", { class: "hint" }, `As ${me.author}.`);
  clear($("act-effects"));
  $("act").querySelector(".error").textContent = "";
  $("act-go").textContent = "Show what it would do"; $("act-go").className = ""; $("act-go").disabled = false;
  $("act").showModal();
}
// Focus goes back to where it was; if that is gone, to the view, never to nowhere.
$("act").addEventListener("close", () => { if (doing?.opener?.isConnected) doing.opener.focus(); if (document.activeElement === document.body) $("view").focus(); });
function drawPlan(at_, reply) {
  put(at_, "h2", {}, `Dry run of “${reply.title}”: nothing is touched yet`);
  for (const line of reply.plan) put(at_, "p", {}, line);
  const table = grid(at_, ["", "check", "seen"]);
  rows(table, reply.checks, (one) => one.check, (one) => [el("span", { class: one.held ? "s-up" : "s-down" }, one.held ? "● ok" : "✕ NO"), one.check, [one.seen, "long"]]);
  if (reply.may_run) return true;
  put(at_, "p", { class: "strands" }, "It must not run now: not every check holds. Mend that, and look again.");
  $("act-go").disabled = true; $("act-no").focus();
  return false;
}
$("act-no").addEventListener("click", () => $("act").close());
$("act").querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (doing.asks) return;  // what was sent once is not sent again before it is answered
  const value = (name) => $("act-" + name)?.value, error = $("act").querySelector(".error");
  const body = { do: doing.do, target: doing.target, why: value("why") };
  if (value("for") !== undefined) body.for_s = 60 * Number(value("for"));
  if (value("over") !== undefined) body.over_s = Number(value("over"));
  if (value("ms") !== undefined) body.ms = Number(value("ms"));
  for (const name of ["model", "weights"]) if (value(name) !== undefined) body[name] = value(name).trim();
  if (doing.values) body.values = doing.values;
  error.textContent = "";
  doing.asks = true;
  try {
    if (!doing.shown) {
      const reply = await ask("act", { ...body, dry_run: true }), at_ = clear($("act-effects"));
      doing.shown = reply;
      for (const field of $("act-fields").querySelectorAll("input")) field.disabled = true;
      if (reply.plan && !drawPlan(at_, reply)) return;
      if (!reply.plan) put(at_, "h2", {}, "Dry run: nothing is written yet");
      const stands = reply.stands;
      if (!reply.plan) put(at_, "p", {}, !stands ? "Nothing stands there now." : stands.author ? `It replaces what ${stands.author} set: ${stands.why}` : "It changes what was written there by hand.");
      for (const line of reply.effects || []) put(at_, "p", { class: line.startsWith("strands") ? "strands" : "" }, line);
      if ((reply.strands || []).length) put(at_, "label", {}, el("input", { type: "checkbox", id: "act-force" }), ` leave ${reply.strands.length} without a region`);
      put(at_, "label", {}, `Type ${doing.target} to confirm `, el("input", { id: "act-confirm", autocomplete: "off", spellcheck: "false" })).querySelector("input").focus();
      $("act-go").textContent = "Do it"; $("act-go").className = "danger";
    } else {
      await ask("act", { ...body, dry_run: false, revision: doing.shown.revision, confirm: value("confirm"), force: Boolean($("act-force")?.checked) });
      $("act").close();
      if (view === "drills") loadDrills();
    }
  } catch (problem) { error.textContent = problem.message; }
  finally { doing.asks = false; }
});

// -- the last hour

async function loadPast() {
  try { chunks = (await ask("past")).chunks; } catch { /* shown elsewhere */ }
  tick();
}
setInterval(() => { if (me.may && me.may !== "metrics" && !document.hidden) loadPast(); }, 15000);

// What can be looked back on: the last hour, or a drill whose pictures stand with its report.
const times = () => archive || chunks, latest = () => archive ? archive.at(-1).to_ms : now.at;
async function replay(run, ms) {
  if (!inLastHour(ms)) {
    try {
      const recorded = (await ask(`drills/${encodeURIComponent(run)}/past`)).chunks;
      archive = recorded.map((one) => ({ chunk: one, from_ms: one.picture.at, to_ms: one.patches.at(-1)?.at ?? one.picture.at }));
    } catch (error) { failed($("report"), error); return; }
  }
  seek(ms);
  location.hash = "world";
}
const inLastHour = (ms) => ms >= (chunks[0]?.from_ms ?? Infinity);

async function hourly(one, open) {
  if (!kept.has(one.number) || open) { kept.set(one.number, await ask("past/" + one.number)); if (kept.size > 12) kept.delete(kept.keys().next().value); }
  return kept.get(one.number);
}
async function picture(ms) {
  const index = Math.max(0, times().findLastIndex((one) => one.from_ms <= ms)), one = times()[index];
  if (!one) throw new Error("nothing is kept yet");
  const chunk = one.chunk || await hourly(one, index === chunks.length - 1);
  let made = chunk.picture;
  for (const patch of chunk.patches) { if ((patch.at ?? made.at) > ms) break; made = apply(made, patch); }
  return made;
}
let seeking = 0;
async function seek(ms) {
  const mine = ++seeking;
  past = Math.min(ms, latest());
  $("scrub").value = past;
  press();
  try {
    if (!archive && (!chunks.length || ms > chunks.at(-1).to_ms)) await loadPast();
    const made = await picture(past);
    if (mine !== seeking) return;
    shown = made;  // `past` stays what was asked for: pictures may lie further apart than an arrow goes
    draw(); tick();
  } catch (error) { $("moment").textContent = error.message; }
}
function press() {
  $("live").setAttribute("aria-pressed", String(past === null));
  $("pause").setAttribute("aria-pressed", String(past !== null));
}
$("live").addEventListener("click", () => { seeking++; past = archive = null; shown = now; press(); draw(); tick(); });
$("pause").addEventListener("click", () => { past === null ? (past = now.at, press(), draw(), tick()) : $("live").click(); });
$("scrub").addEventListener("input", () => seek(Number($("scrub").value)));
const STEPS = { ArrowLeft: -1e3, ArrowDown: -1e3, ArrowRight: 1e3, ArrowUp: 1e3, PageDown: -6e4, PageUp: 6e4 };
$("scrub").addEventListener("keydown", (event) => { const step = STEPS[event.key]; if (step) { event.preventDefault(); seek(Math.max(Number($("scrub").min), (past ?? now.at) + step)); } });
$("mark").addEventListener("click", () => { mark = shown; $("mark").textContent = `Marked ${clock(mark.at)}`; $("diff").disabled = false; });
$("compare-close").addEventListener("click", () => { $("compare").hidden = true; $("diff").focus(); });
$("diff").addEventListener("click", () => {
  const flat = (tree, path = "", into = {}) => { for (const [key, value] of Object.entries(tree || {})) typeof value === "object" && !Array.isArray(value) ? flat(value, path ? path + " › " + key : key, into) : into[path ? path + " › " + key : key] = Array.isArray(value) ? value.join(", ") : value; return into; };
  const part = (one) => { const { regions, balancers, replicas, queues, overrides, law } = one; return flat({ regions, balancers, replicas, queues, overrides, law }); };
  const a = part(mark), b = part(shown), keys = [...new Set([...Object.keys(a), ...Object.keys(b)])].filter((key) => a[key] !== b[key] && !/seen_at$|_age_s$|age_s$/.test(key));
  $("compare-title").textContent = `${clock(mark.at)} beside ${clock(shown.at)}: ${keys.length} differ`;
  rows($("compare").querySelector("table"), keys.slice(0, 200), (key) => key, (key) => [key, [String(a[key] ?? "–"), "long"], [String(b[key] ?? "–"), "long"]], { none: "nothing differs" });
  $("compare").hidden = false;
});
$("tenant").addEventListener("change", () => { tenant = $("tenant").value; draw(); });
addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const views = Object.keys(VIEWS);
  if (/^[1-5]$/.test(event.key)) location.hash = views[Number(event.key) - 1];
  else if (event.key === "p") $("pause").click();
  else if (event.key === "l") $("live").click();
});

// -- beginning

fetch("/console/coast.json").then((answer) => answer.json()).then(({ rings }) => {
  coast = rings.map((ring) => { let x = 0, y = 0, d = ""; for (let i = 0; i < ring.length; i += 2) { x += ring[i]; y += ring[i + 1]; d += (i ? "L" : "M") + (360 + x) + " " + (180 - y); } return d + "Z"; }).join("");
  draw();
}).catch(() => {});
const given = location.hash.slice(1);
if (given.length >= 16 && !given.includes("/")) { history.replaceState(null, "", location.pathname + "#world"); await enter(given).catch(() => who()); }
else await who();
show();
requestAnimationFrame(animate);
