// Stands in a copy of the page and uses it as a reader does; what it sees is left as JSON in #seen.
const seen = { errors: [] };
addEventListener("error", (event) => seen.errors.push(String(event.message || event.target.src)), true);
addEventListener("securitypolicyviolation", (event) => seen.errors.push(`${event.violatedDirective} ${event.blockedURI}`));
addEventListener("load", () => {
  const one = (selector) => document.querySelector(selector), all = (selector) => [...document.querySelectorAll(selector)];
  const at = (name) => all("#main thead th").findIndex((head) => head.dataset.name === name);
  const column = (name) => all("#main tbody tr").filter((row) => row.offsetParent).map((row) => row.cells[at(name)].dataset.value);
  const choose = (selector, value) => { one(selector).value = value; one(selector).dispatchEvent(new Event("input", { bubbles: true })); };
  const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const after = (act, look) => { act(); return look(); };
  const sort = (name) => all("#main thead button")[at(name)].click();
  try {
    seen.styled = getComputedStyle(document.body).maxWidth !== "none";
    seen.images = all("img").map((image) => image.naturalWidth > 0);
    seen.heads = all("h2").map((head) => head.textContent);
    seen.folded = column("category");
    seen.mats = [column("mat"), after(() => sort("mat"), () => column("mat")), after(() => sort("mat"), () => column("mat"))];
    sort("method");
    seen.opened = after(() => one(".fold").click(), () => column("category"));
    seen.every = after(() => one("#unfold").click(), () => one("#count").value);
    one("#unfold").click();
    seen.qa = after(() => choose("#by-category", "qa"), () => column("category"));
    seen.vanilla = after(() => choose("#by-method", "vanilla"), () => column("method"));
    choose("#by-category", "");
    choose("#by-method", "");
    seen.found = after(() => choose("#find", "QA vanilla"), () => one("#count").value);
    choose("#find", "");
    const extra = () => getComputedStyle(one("#main .extra")).display;
    seen.extra = [extra(), after(() => one("#extra").click(), extra)];
    seen.nodes = all("details.tree svg .node").length;
    seen.shades = new Set(all(".node circle").map((dot) => getComputedStyle(dot).fill)).size;
    one(".node").focus();
    press(one(".node"), "ArrowRight");
    seen.node = one(".tree .detail").textContent;
    seen.table = one("#table").getBoundingClientRect().top + scrollY;
    seen.right = one('#main th[data-name="speedup_vanilla"]').getBoundingClientRect().right;
    seen.overflow = document.documentElement.scrollWidth - innerWidth;
  } catch (error) {
    seen.errors.push(String(error.stack));
  }
  const out = document.createElement("pre");
  out.id = "seen";
  out.textContent = JSON.stringify(seen);
  document.body.append(out);
});
