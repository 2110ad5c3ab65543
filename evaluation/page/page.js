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
      const text = [row.dataset.method, ...[...row.cells].map((cell) => cell.textContent)].join(" ").toLowerCase();
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

table();
trees();
