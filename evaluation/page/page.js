"use strict";
// The report's own script. Data become text nodes, never markup.

const $ = (id) => document.getElementById(id);

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// The table: a configuration a body, its overall row first and its subtasks by a click; headers sort, filters hide rows.
function table() {
  const table = $("main"), bodies = [...table.tBodies], heads = [...table.tHead.rows[0].cells];
  const rows = bodies.flatMap((body) => [...body.rows]);
  const find = $("find"), method = $("by-method"), category = $("by-category"), unfold = $("unfold");
  let order = null; // (a, b) of two rows, once a header was clicked

  function compare(column, number, down) {
    return (a, b) => {
      const [x, y] = [a, b].map((row) => row.cells[column].dataset.value);
      if (x === "" || y === "") return (x === "") - (y === ""); // what has no value comes last, either way
      return (down ? -1 : 1) * (number ? Number(x) - Number(y) : x.localeCompare(y));
    };
  }

  // Rows that are shown: those that match, and of them the subtasks of folded configurations only while rows are searched.
  function arrange() {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const folds = words.length === 0 && category.value === "";
    table.classList.toggle("folds", folds);
    for (const row of rows) {
      const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word))
        || (method.value !== "" && row.dataset.method !== method.value)
        || (category.value !== "" && row.dataset.category !== category.value);
    }
    if (order) {
      const first = (body) => [...body.rows].find((row) => !row.hidden) || body.rows[0];
      for (const body of bodies) {
        const [overall, ...subtasks] = body.rows;
        body.append(overall, ...subtasks.sort(order));
      }
      table.append(...bodies.toSorted((a, b) => order(first(a), first(b))));
    }
    const shown = rows.filter((row) => !row.hidden
      && !(folds && row.classList.contains("subtask") && !row.parentNode.classList.contains("open")));
    $("count").textContent = `${shown.length} of ${rows.length} rows`;
  }

  function sort(column) {
    const head = heads[column], number = head.classList.contains("number"), was = head.getAttribute("aria-sort");
    const down = was ? was === "ascending" : number;
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    order = compare(column, number, down);
    arrange();
  }

  function open(body, yes) {
    const button = body.querySelector(".fold");
    if (!button) return;
    body.classList.toggle("open", yes);
    button.setAttribute("aria-expanded", String(yes));
  }

  heads.forEach((head, column) => {
    const button = element("button", "", head.textContent);
    button.type = "button";
    button.addEventListener("click", () => sort(column));
    head.replaceChildren(button);
  });
  for (const body of bodies.filter((body) => body.rows.length > 1)) {
    const cell = body.rows[0].cells[0], button = element("button", "fold");
    button.type = "button";
    button.setAttribute("aria-label", `Subtasks of ${cell.textContent}`);
    cell.classList.add("foldable");
    cell.prepend(button);
    open(body, false);
    cell.addEventListener("click", () => { open(body, !body.classList.contains("open")); arrange(); });
  }
  for (const control of [find, method, category]) control.addEventListener("input", arrange);
  unfold.addEventListener("change", () => { bodies.forEach((body) => open(body, unfold.checked)); arrange(); });
  $("extra").addEventListener("change", () => table.classList.toggle("wide", $("extra").checked));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").hidden = false;
  arrange();
}

// Many small things behind one tab stop: arrow keys move between them, and each says what it is in `detail`.
function rove(container, items, detail, words) {
  const keys = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const say = (item) => { detail.textContent = words(item); };
  items.forEach((item, i) => {
    item.setAttribute("tabindex", i ? "-1" : "0");
    item.addEventListener("pointerenter", () => say(item));
    item.addEventListener("focus", () => say(item));
    item.addEventListener("click", () => item.focus());
    item.addEventListener("keydown", (event) => {
      const next = event.key === "Home" ? 0 : event.key === "End" ? items.length - 1 : i + keys[event.key];
      if (!items[next]) return;
      event.preventDefault();
      item.setAttribute("tabindex", "-1");
      items[next].setAttribute("tabindex", "0");
      items[next].focus();
    });
  });
}

function trees() {
  for (const tree of document.querySelectorAll("details.tree")) {
    rove(tree, [...tree.querySelectorAll(".node")], tree.querySelector(".detail"), (node) => node.querySelector("title").textContent);
  }
}

// The reader of single answers.
function reader() {
  const data = JSON.parse($("data").textContent);
  const question = $("question"), method = $("method"), place = $("answer");
  if (!data.questions.length) return;

  const depth = (length) => `l${Math.min(Math.max(length, 1), 8)}`;

  function words(turn, step) {
    const length = turn.lengths[step], path = turn.paths && turn.paths[step], nodes = turn.nodes && turn.nodes[step];
    let text = `Step ${step + 1} of ${turn.lengths.length}: ${length} token${length === 1 ? "" : "s"}`;
    if (nodes === 1) return `${text}; nothing was drafted.`;
    if (nodes !== undefined) text += `; ${nodes - 1} nodes drafted`;
    if (path === undefined) return `${text}.`;
    return path === "" ? `${text}, none accepted.` : `${text}, accepted ranks ${path}.`;
  }

  // Runs of text, one a step; the ids of the text are as many as the accepted lengths add up to.
  function runs(turn, pieces) {
    const made = [];
    let at = 0;
    turn.lengths.forEach((length, step) => {
      const run = element("span", `run ${step % 2 ? "odd" : "even"} ${depth(length)}`);
      run.append(pieces.slice(at, at + length).join(""));
      made.push(run);
      at += length;
    });
    return made;
  }

  function strip(turn) {
    const box = element("div", "steps");
    box.append(...turn.lengths.map((n, step) => element("span", `run ${step % 2 ? "odd" : "even"} ${depth(n)}`, String(n))));
    return box;
  }

  function show() {
    const answer = data.answers.find((a) => a.question === question.selectedIndex && a.run === method.selectedIndex);
    const current = data.questions[question.selectedIndex];
    place.replaceChildren();
    $("step").hidden = !answer;
    $("previous").disabled = question.selectedIndex === 0;
    $("next").disabled = question.selectedIndex === data.questions.length - 1;
    if (!answer) {
      place.append(element("p", "quiet", "This method has not answered this question."));
      return;
    }
    answer.turns.forEach((turn, i) => {
      const box = element("div", "turn"), text = data.texts[turn.text];
      const tokens = turn.lengths.reduce((a, b) => a + b, 0);
      const mat = turn.lengths.length ? `: ${tokens} tokens in ${turn.lengths.length} steps, ${(tokens / turn.lengths.length).toFixed(2)} a step` : "";
      box.append(element("h3", "", `Turn ${i + 1}${mat}`));
      if (current.turns[i] !== undefined) box.append(element("p", "prompt", current.turns[i]));
      const paragraph = element("div", "text");
      let items = [];
      if (text.pieces && text.pieces.length === tokens) {
        items = runs(turn, text.pieces);
        paragraph.append(...items);
        box.append(paragraph);
      } else {
        paragraph.textContent = text.pieces ? text.pieces.join("") : text.text;
        const below = strip(turn);
        items = [...below.children];
        box.append(paragraph, below);
      }
      items.forEach((item, step) => { item.title = words(turn, step); });
      rove(box, items, $("step"), (item) => item.title);
      place.append(box);
    });
  }

  function go(by) {
    question.selectedIndex += by;
    show();
  }

  question.append(...data.questions.map((q) => element("option", "", `${q.category}, question ${q.id}`)));
  method.append(...data.runs.map((name) => element("option", "", name)));
  method.selectedIndex = data.runs.length - 1; // the tables' order ends in the methods that draft
  question.addEventListener("input", show);
  method.addEventListener("input", show);
  $("previous").addEventListener("click", () => go(-1));
  $("next").addEventListener("click", () => go(1));
  $("choose").addEventListener("submit", (event) => event.preventDefault());
  const swatch = (n) => { const item = element("span"); item.append(element("span", `run even ${depth(n)}`, n === 8 ? " 8+ " : ` ${n} `), element("span", `run odd ${depth(n)}`, n === 8 ? " 8+ " : ` ${n} `)); return item; };
  $("runs-legend").append("tokens that a step added:", ...[1, 2, 4, 6, 8].map(swatch));
  $("runs-legend").hidden = $("choose").hidden = false;
  show();
}

table();
trees();
reader();
