// The labeling page. An answer is sent, and the next image is shown only when the server has it on disk.
"use strict";
const $ = id => document.getElementById(id);
let state = null;     // as the server tells it
let shown = null;     // number of the image on the screen
let about = null;     // its size and contrast
let queue = [];       // images to look at again: skipped ones, or one that people disagree about
let busy = false;     // an answer is on its way
let since = 0;        // when the image appeared
let view = {scale: 1, x: 0, y: 0};

async function ask(path, body) {
  const options = body === undefined ? {} : {method: "POST", body: JSON.stringify(body)};
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("FewLabel does not answer. All answers so far are on disk; start the command again to go on.");
  }
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

function complain(error) {
  $("error").textContent = error.message;
  $("error").hidden = false;
}

// One thing at a time: a key that is pressed while an answer is on its way must not answer the next image.
async function alone(work) {
  if (busy) return;
  busy = true;
  try {
    await work();
    $("error").hidden = true;
  } catch (error) {
    complain(error);
  } finally {
    busy = false;
  }
}

function answer(note, label) {
  return alone(async () => {
    if (shown === null) return;
    const seconds = (performance.now() - since) / 1000;
    state = await ask("answer", {image: shown, note, label, seconds});
    await next();
  });
}

function undo() {
  return alone(async () => {
    const found = await ask("undo", {});
    state = found.state;
    await show(found.image);
  });
}

async function next() {
  const image = queue.length ? queue.shift() : state.current;
  if (image === null) finish(); else await show(image);
}

async function show(image) {
  shown = null;
  $("end").hidden = true;
  $("work").hidden = false;
  hideOpinion();
  tell();
  about = null;
  try {
    about = await ask(`about/${image}`);
  } catch (error) {  // an image that cannot be read must not stop the others: skip it, or say "cannot tell"
    shown = image;
    $("image").removeAttribute("src");
    $("path").textContent = "";
    throw error;
  }
  $("path").textContent = about.path;
  for (const end of ["low", "high"]) {
    Object.assign($(end), {min: about.least, max: about.most});
    $(end).value = about[end];
  }
  await draw(image);
  fit();
  shown = image;
  since = performance.now();
}

async function draw(image) {
  const [low, high] = [Number($("low").value), Number($("high").value)];
  $("low-value").textContent = rounded(low);
  $("high-value").textContent = rounded(high);
  const usual = low === about.low && high === about.high;
  $("image").src = `image/${image}` + (usual ? "" : `?low=${low}&high=${high}`);
  await $("image").decode();
}

function rounded(value) {
  return about.most - about.least > 20 ? Math.round(value) : value.toFixed(2);
}

function tell() {
  $("count").textContent = `${state.done} of ${state.total}`;
  $("bar").style.width = `${100 * state.done / state.total}%`;
  $("progress").setAttribute("aria-valuenow", state.done);
  $("progress").setAttribute("aria-valuemax", state.total);
  $("undo").disabled = $("end-undo").disabled = !state.undo;
  $("ask").hidden = !state.opinion;
  state.classes.forEach((one, number) => {
    $("classes").children[number].querySelector("small").textContent = one.count || "";
  });
}

function finish() {
  shown = null;
  tell();
  $("work").hidden = true;
  $("path").textContent = "";
  const labeled = state.classes.reduce((sum, one) => sum + one.count, 0);
  const parts = [`${labeled} labeled`];
  if (state.cannot_tell) parts.push(`${state.cannot_tell} where you could not tell`);
  if (state.skipped.length) parts.push(`${state.skipped.length} skipped`);
  $("end-title").textContent = `All ${state.total} images are done`;
  $("end-text").textContent = `${parts.join(", ")}. The answers are in ${state.file}. You can close this page and end the command.`;
  $("end-advice").textContent = state.advice;
  $("again").hidden = !state.skipped.length;
  $("again-text").textContent = `Look at the ${state.skipped.length} skipped again`;
  $("disagreements").hidden = !state.disagreements.length;
  $("differing").replaceChildren(...state.disagreements.map(difference));
  $("end").hidden = false;
}

function difference(one) {
  const [row, button, image, text] = ["li", "button", "img", "span"].map(name => document.createElement(name));
  button.type = "button";
  image.src = `image/${one.image}`;
  image.alt = "";
  text.textContent = Object.entries(one.labels).map(([who, label]) => `${who}: ${label}`).join(", ") + ` (${one.path})`;
  button.append(image, text);
  button.addEventListener("click", () => alone(() => show(one.image)));
  row.append(button);
  return row;
}

function again() {
  return alone(async () => {
    queue = [...state.skipped];
    await next();
  });
}

// What the model says is hidden until someone asks, so that it does not lead them.
function hideOpinion() {
  $("opinion").hidden = true;
  $("opinion").replaceChildren();
  $("ask-text").textContent = "Ask the model";
}

function opinion() {
  if (!$("opinion").hidden) return hideOpinion();
  return alone(async () => {
    if (shown === null || !state.opinion) return;
    const found = await ask(`opinion/${shown}`);
    $("opinion").replaceChildren(...found.slice(0, 5).map(({name, p}) => {
      const [row, text, track, share] = ["div", "span", "i", "b"].map(kind => document.createElement(kind));
      text.textContent = name;
      track.style.width = `${Math.max(1, 80 * p)}px`;
      share.textContent = `${Math.round(100 * p)} %`;
      row.append(text, track, share);
      return row;
    }));
    $("opinion").hidden = false;
    $("ask-text").textContent = "Hide it";
  });
}

// Zoom, and moving the image. A scale of 1 fits the stage.
function fit() {
  view = {scale: 1, x: 0, y: 0};
  place();
}

function place() {
  if (!about) return;
  const box = $("stage").getBoundingClientRect();
  const whole = Math.min(box.width / about.width, box.height / about.height) * view.scale;
  const [width, height] = [about.width * whole, about.height * whole];
  const [far, high] = [Math.max(0, (width - box.width) / 2), Math.max(0, (height - box.height) / 2)];
  view.x = Math.max(-far, Math.min(far, view.x));
  view.y = Math.max(-high, Math.min(high, view.y));
  Object.assign($("image").style, {width: `${width}px`, height: `${height}px`});
  $("image").style.transform = `translate(${view.x - width / 2}px, ${view.y - height / 2}px)`;
  $("image").classList.toggle("coarse", whole > 3);
}

function zoom(factor, x = 0, y = 0) {  // towards a point, counted from the middle of the stage
  const scale = Math.max(1, Math.min(40, view.scale * factor));
  const grown = scale / view.scale;
  view = {scale, x: x + (view.x - x) * grown, y: y + (view.y - y) * grown};
  place();
}

function move(x, y) {
  view.x += x;
  view.y += y;
  place();
}

const fingers = new Map();
function middle(event) {
  const box = $("stage").getBoundingClientRect();
  return [event.clientX - box.left - box.width / 2, event.clientY - box.top - box.height / 2];
}

$("stage").addEventListener("pointerdown", event => {
  $("stage").setPointerCapture(event.pointerId);
  fingers.set(event.pointerId, event);
});
$("stage").addEventListener("pointermove", event => {
  const before = fingers.get(event.pointerId);
  if (!before) return;
  fingers.set(event.pointerId, event);
  const other = [...fingers.values()].find(one => one.pointerId !== event.pointerId);
  if (!other) return move(event.clientX - before.clientX, event.clientY - before.clientY);
  const apart = one => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
  zoom(apart(event) / Math.max(1, apart(before)), ...middle(event));
});
for (const end of ["pointerup", "pointercancel"]) {
  $("stage").addEventListener(end, event => fingers.delete(event.pointerId));
}
$("stage").addEventListener("wheel", event => {
  event.preventDefault();
  zoom(Math.exp(-event.deltaY / 400), ...middle(event));
}, {passive: false});
$("stage").addEventListener("dblclick", event => view.scale > 1 ? fit() : zoom(3, ...middle(event)));
addEventListener("resize", place);

// Contrast. Only the last of many changes is drawn.
let wanted = false, drawing = false;
async function redraw() {
  wanted = true;
  if (drawing || shown === null || !about) return;
  drawing = true;
  while (wanted) {
    wanted = false;
    try { await draw(shown); } catch { break; }  // another image came meanwhile
  }
  drawing = false;
}

function contrast(end, steps) {
  $(end).value = Number($(end).value) + steps * (about.most - about.least) / 40;
  redraw();
}

function reset() {
  fit();
  for (const end of ["low", "high"]) $(end).value = about[end];
  redraw();
}

$("low").addEventListener("input", redraw);
$("high").addEventListener("input", redraw);

const COMMANDS = {
  c: () => answer("cannot tell", ""), s: () => answer("skipped", ""), u: undo, m: opinion, z: reset,
  Backspace: undo, "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), "−": () => zoom(1 / 1.4),
  ArrowLeft: () => move(60, 0), ArrowRight: () => move(-60, 0), ArrowUp: () => move(0, 60), ArrowDown: () => move(0, -60),
  ",": () => contrast("high", -1), ".": () => contrast("high", 1), ";": () => contrast("low", -1), "'": () => contrast("low", 1),
};
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat && !event.key.startsWith("Arrow")) return;
  if (event.target.type === "range" && event.key.startsWith("Arrow")) return;  // they move the slider
  const ended = !$("end").hidden;
  const command = ended ? {s: $("again").hidden ? undefined : again, u: undo, Backspace: undo}[event.key] : COMMANDS[event.key];
  const chosen = ended ? undefined : state?.classes.find(one => one.key && one.key === event.key);
  if (!command && !chosen) return;
  event.preventDefault();
  if (chosen) answer("", chosen.name); else command();
});
$("cannot").addEventListener("click", COMMANDS.c);
$("skip").addEventListener("click", COMMANDS.s);
$("undo").addEventListener("click", undo);
$("end-undo").addEventListener("click", undo);
$("again").addEventListener("click", again);
$("ask").addEventListener("click", opinion);
$("reset").addEventListener("click", reset);
$("larger").addEventListener("click", COMMANDS["+"]);
$("smaller").addEventListener("click", COMMANDS["-"]);

alone(async () => {
  state = await ask("state");
  $("classes").replaceChildren(...state.classes.map(one => {
    const [button, key, text, count] = ["button", "kbd", "span", "small"].map(name => document.createElement(name));
    button.type = "button";
    key.textContent = one.key;
    key.hidden = !one.key;
    text.textContent = one.name;
    button.append(key, text, count);
    button.addEventListener("click", () => { button.blur(); answer("", one.name); });
    return button;
  }));
  await next();
});
