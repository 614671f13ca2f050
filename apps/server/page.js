"use strict";
const at = (id) => document.getElementById(id);
const KEY = "ruvmlx-api-key";
let messages = [];      // the messages of a chat that the server does not store
let chat = null;        // the id of the stored chat on the page
let keeps = false;      // true if this page may see and store the user's chats
let running = null;     // ends the reply in progress
let timer = null;

function make(tag, kind, text) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}

/* Send one request to this server. If it fails, throw an error with the server's message. */
async function ask(method, path, body, signal) {
  const headers = {}, key = sessionStorage.getItem(KEY);
  if (key) headers["Authorization"] = "Bearer " + key;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const data = body === undefined ? undefined : JSON.stringify(body);
  const answer = await fetch(path, { method, headers, body: data, signal, cache: "no-store" });
  if (answer.ok) return answer;
  let message = "the server answered with status " + answer.status + ".";
  try { message = (await answer.json()).error.message; } catch { /* The answer is not JSON: the error shows the status. */ }
  const error = new Error(message);
  error.status = answer.status;
  throw error;
}

function showWrong(error) {
  at("wrong").textContent = error.message;
  at("wrong").hidden = false;
}

/* -- the server's status ------------------------------------------------------------------------------------ */

function bytes(count) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return (count < 10 && unit ? count.toFixed(1) : Math.round(count)) + " " + units[unit];
}

function duration(seconds) {
  const hours = Math.floor(seconds / 3600), minutes = Math.floor(seconds / 60) % 60;
  return hours ? hours + " h " + minutes + " min" : minutes ? minutes + " min" : Math.floor(seconds) + " s";
}

const rate = (value) => value === null ? "-" : value.toFixed(1);

function showStatus(status) {
  at("model").textContent = status.model;
  at("state").textContent = status.replies_in_progress ? "writing" : status.idle_work || "ready";
  const memory = status.memory;
  const facts = [
    ["Adapter", status.adapter], ["Replies in progress", status.replies_in_progress],
    ["Tokens per second", rate(status.tokens_per_second)], ["Running for", duration(status.uptime_seconds)],
    ["Process", bytes(memory.resident_bytes) + " of " + bytes(memory.total_bytes)],
    ["Model", bytes(memory.model_bytes)], ["KV caches", bytes(memory.kv_bytes)],
    ["Adapters", bytes(memory.adapter_bytes)],
  ];
  at("facts").replaceChildren(...facts.map(([name, value]) => {
    const box = make("div");
    box.append(make("dt", "", name), make("dd", "", String(value)));
    return box;
  }));
  at("memory").replaceChildren(...memory.purposes.map((each) => {
    const name = each.name.replace("_", " ").replace("kv", "KV caches");
    return row([name, "", bytes(each.planned), bytes(each.used), each.limit ? bytes(each.limit) : "-"]);
  }));
  at("requests").replaceChildren(...status.requests.map((each) => {
    const clock = new Date(1000 * each.time).toLocaleTimeString();
    return row([clock, each.method + " " + each.path, each.status, (each.ms / 1000).toFixed(2),
      each.prompt_tokens, each.cached_tokens, each.generated_tokens, rate(each.tokens_per_second)]);
  }));
}

function row(cells) {
  const made = make("tr");
  made.append(...cells.map((cell) => make("td", "", String(cell))));
  return made;
}

async function refresh() {
  clearTimeout(timer);
  try {
    showStatus(await (await ask("GET", "/v1/status")).json());
    if (at("main").hidden) await begin();
  } catch (error) {
    at("state").textContent = error.status ? error.message : "the server does not answer";
    if (error.status === 401) {
      at("login").hidden = false;
      at("main").hidden = at("tabs").hidden = true;
      at("key").focus();
      return;
    }
  }
  timer = setTimeout(refresh, document.hidden ? 15000 : 2000);
}

async function begin() {
  const cards = (await (await ask("GET", "/v1/models")).json()).data.filter((card) => !card.embeds);
  const names = cards.map((card) => card.id);
  at("names").replaceChildren(...names.map((name) => make("option", "", name)));
  await showChats();
  at("login").hidden = true;
  at("main").hidden = at("tabs").hidden = false;
  at("kept").open = matchMedia("(min-width: 45rem)").matches;
  at("ask").focus();
}

at("tabs").onclick = async (event) => {
  const name = event.target.dataset.tab;
  if (!name) return;
  for (const tab of at("tabs").children) {
    tab.setAttribute("aria-pressed", String(tab === event.target));
    at(tab.dataset.tab).hidden = tab !== event.target;
  }
  if (name === "learned") await showLearned();
};

async function showLearned() {
  let lines = ["To see what was learned, this page needs a key of the chat app: see Chats."];
  try {
    if (keeps) lines = (await (await ask("GET", "/v1/learned")).json()).sentences;
  } catch (error) { lines = [error.message]; }
  at("sentences").replaceChildren(...lines.map((line) => make("li", "", line)));
}

/* -- the user's chats ------------------------------------------------------------------------------ */

async function showChats() {
  let may = sessionStorage.getItem(KEY) !== null;  // `keeps` stays the same until the answer arrives
  try {
    const found = may ? (await (await ask("GET", "/v1/chats")).json()).chats : [];
    at("chats").replaceChildren(...found.map(cardOf));
  } catch (error) {
    may = false;
    showWrong(error);
  }
  keeps = may;
  at("unlock").hidden = keeps;
}

function cardOf(card) {
  const item = make("li", card.id === chat ? "here" : "");
  const open = make("button", "open", card.title || "(no title)"), drop = make("button", "drop", "✕");
  open.title = card.title;
  drop.title = "Delete this chat; for a day, ruvmlx sessions restore brings it back";
  open.onclick = () => openChat(card.id);
  drop.onclick = async () => {
    try {
      await ask("DELETE", "/v1/chats/" + encodeURIComponent(card.id));
      if (card.id === chat) clear();
      await showChats();
    } catch (error) { showWrong(error); }
  };
  item.append(open, drop);
  return item;
}

async function openChat(id) {
  try {
    const shown = await (await ask("GET", "/v1/chats/" + encodeURIComponent(id))).json();
    clear();
    chat = id;
    at("system").value = shown.system || "";
    const places = shown.messages.map((message) => {
      const turn = addTurn(message.role, false);
      showPlain(turn.text, message.content);
      turn.thought.textContent = message.thought;
      if (message.reply_id) offerRating(turn.done, message.reply_id, message.rating);
      return turn.text;
    });
    await render(places.filter((_, i) => shown.messages[i].role === "assistant"));
    await showChats();
  } catch (error) { showWrong(error); }
}

function clear() {
  if (running) running.abort();
  messages = [];
  chat = null;
  at("turns").replaceChildren();
  at("wrong").hidden = true;
}

/* -- one chat -------------------------------------------------------------------------------------- */

/* Change the page. If the reader was at its end, scroll to its new end. */
function follow(change) {
  const isAtEnd = innerHeight + scrollY > document.body.scrollHeight - 40;
  change();
  if (isAtEnd) scrollTo(0, document.body.scrollHeight);
}

/* Add a turn to the page. The newest turn is next to the message box. */
function addTurn(role, isNew) {
  const turn = make("div", "turn " + role);
  const thought = make("div", "thought"), text = make("div", "text"), done = make("div", "done row");
  turn.append(make("div", "who", { user: "you", tool: "tool" }[role] || "model"), thought, text, done);
  at("turns").append(turn);
  if (isNew) scrollTo(0, document.body.scrollHeight);
  return { turn, thought, text, done };
}

function showPlain(place, text) {
  place.classList.add("plain");
  place.textContent = text;
}

/* Divide elements into groups whose texts one request to /v1/markdown can have. */
function groupsOf(places) {
  const groups = [];
  let letters = 0;
  for (const place of places) {
    const more = place.textContent.length;
    if (!groups.length || groups.at(-1).length === 500 || letters + more > 262144) {
      groups.push([]);
      letters = 0;
    }
    groups.at(-1).push(place);
    letters += more;
  }
  return groups;
}

/* Replace plain text by the HTML that the server makes of its Markdown. The model cannot add HTML. */
async function render(places) {
  for (const group of groupsOf(places)) {
    try {
      const texts = group.map((place) => place.textContent);
      const made = (await (await ask("POST", "/v1/markdown", { texts })).json()).html;
      follow(() => group.forEach((place, i) => {
        place.replaceChildren(...new DOMParser().parseFromString(made[i], "text/html").body.childNodes);
        place.classList.remove("plain");
        for (const link of place.querySelectorAll("a")) { link.target = "_blank"; link.rel = "noopener noreferrer"; }
      }));
    } catch { /* Keep the plain text. */ }
  }
}

/* Yield the data of each server-sent event. */
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length && data[0] !== "[DONE]") yield JSON.parse(data.join("\n"));
    }
  }
}

/* Yield the pieces of a reply, {id, text, thought}. If the chat is stored, a piece also has the chat's id. */
async function* reply(text, talk) {
  const numbers = { temperature: "temperature", top_p: "topp", max_tokens: "longest" };
  const body = { model: at("names").value }, system = at("system").value.trim();
  for (const [name, id] of Object.entries(numbers)) if (at(id).value) body[name] = Number(at(id).value);
  if (keeps) {
    const asked = { ...body, chat, content: text };
    if (chat !== null || system) asked.system = system;
    const answer = await ask("POST", "/v1/chats", asked, running.signal);
    for await (const event of eventsOf(answer)) {
      if (event.error) throw new Error(event.error.message);
      yield { id: event.reply_id, text: event.text, thought: event.thought, chat: event.chat };
    }
    return;
  }
  const asked = { ...body, stream: true, messages: system ? [{ role: "system", content: system }, ...talk] : talk };
  const answer = await ask("POST", "/v1/chat/completions", asked, running.signal);
  for await (const event of eventsOf(answer)) {
    if (event.error) throw new Error(event.error.message);
    for (const { delta } of event.choices) {
      yield { id: event.id, text: delta.content || "", thought: delta.reasoning_content || "" };
    }
  }
}

async function send(text) {
  const talk = messages;  // `messages` changes if the user begins a new chat before the reply ends
  const mine = addTurn("user", true);
  showPlain(mine.text, text);
  talk.push({ role: "user", content: text });
  const turn = addTurn("assistant", true), own = running = new AbortController();
  at("send").disabled = true;
  at("stop").hidden = false;
  at("wrong").hidden = true;
  let id = null, written = "";
  try {
    for await (const piece of reply(text, talk)) {
      id = piece.id;
      if (piece.chat && talk === messages) chat = piece.chat;
      written += piece.text;
      follow(() => {
        turn.thought.textContent += piece.thought;
        showPlain(turn.text, written);
      });
    }
  } catch (error) {
    if (error.name !== "AbortError") showWrong(error);
  }
  if (running === own) {
    running = null;
    at("send").disabled = false;
    at("stop").hidden = true;
  }
  if (written) {
    talk.push({ role: "assistant", content: written });
    follow(() => offerRating(turn.done, id, null));
    await render([turn.text]);
  } else {  // remove the question, because two questions must not follow each other
    talk.pop();
    mine.turn.remove();
    turn.turn.remove();
    if (talk === messages && !at("ask").value) at("ask").value = text;
  }
  refresh();
  if (keeps) showChats();
}

/* -- ratings --------------------------------------------------------------------------------------- */

function learnedWords(done) {
  if (!done.applied) return "kept; it changed nothing";
  const share = done.kl_cap ? done.kl / done.kl_cap : 0;
  const used = share > 0 && share < 0.01 ? "under 1%" : Math.round(100 * share) + "%";
  const how = done.logprob_after >= done.logprob_before ? "more" : "less";
  return "learned: " + how + " like this. Of the allowed change, " + used + " is used (" +
    done.adapter + ", version " + done.adapter_version + ")";
}

/* Show rating buttons under a reply. A rating changes the weights at once. The user can take it back. */
function offerRating(place, id, given) {
  const up = make("button", "up", "👍"), down = make("button", "down", "👎"), undo = make("button", "undo", "Take back");
  const said = make("span", "said");
  up.title = "Good: the model learns to write more like this";
  down.title = "Bad: the model learns to write less like this";
  undo.hidden = given === null;
  up.classList.toggle("chosen", ["up", "4", "5"].includes(given));
  down.classList.toggle("chosen", ["down", "1", "2"].includes(given));
  const act = async (button, work) => {
    for (const each of [up, down, undo]) each.disabled = true;
    try {
      said.textContent = await work();
      at("wrong").hidden = true;
      for (const each of [up, down]) each.classList.toggle("chosen", each === button);
      undo.hidden = button === undo;
    } catch (error) {
      showWrong(error);
    }
    for (const each of [up, down, undo]) each.disabled = false;
    refresh();
  };
  const rateIt = (rating) => async () =>
    learnedWords(await (await ask("POST", "/v1/ratings", { id, rating })).json());
  up.onclick = () => act(up, rateIt("up"));
  down.onclick = () => act(down, rateIt("down"));
  undo.onclick = () => act(undo, async () => {
    await ask("DELETE", "/v1/ratings/" + encodeURIComponent(id));
    return "taken back";
  });
  place.append(up, down, undo, said);
}

/* -- keys and buttons ------------------------------------------------------------------------------ */

at("form").onsubmit = (event) => {
  event.preventDefault();
  const text = at("ask").value.trim();
  if (!text || running) return;
  at("ask").value = "";
  send(text);
};
at("ask").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
};
at("stop").onclick = () => { if (running) running.abort(); };
at("fresh").onclick = () => { clear(); if (keeps) showChats(); at("ask").focus(); };
at("login").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value.trim());
  refresh();
};
at("unlock").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("chatkey").value.trim());
  clear();
  showChats();
};
document.addEventListener("visibilitychange", () => { if (!document.hidden && !at("main").hidden) refresh(); });

/* The address that `ruvmlx serve` prints has the key after #. Browsers do not send this part. */
if (location.hash.startsWith("#key=")) {
  sessionStorage.setItem(KEY, decodeURIComponent(location.hash.slice(5)));
  history.replaceState(null, "", location.pathname);
}
refresh();
