"use strict";
// The address after # is the whole state: a section, `events?q=…&sort=…&dir=…`, or an event's or episode's page.
(() => {
  const report = document.getElementById("report");
  const view = document.getElementById("view");
  const table = document.getElementById("event-table");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const filter = document.getElementById("filter");
  const found = document.getElementById("found");
  const numeric = new Set(["dates", "forecasts", "brier", "market", "floor"]);
  const home = document.title;
  let sort = "";
  let descending = true;

  function compare(a, b) {
    const [x, y] = [a.dataset[sort], b.dataset[sort]];
    if (x === "" || y === "") return (x === "") - (y === ""); // what has no value comes last, either way
    const order = numeric.has(sort) ? Number(x) - Number(y) : x.localeCompare(y);
    return descending ? -order : order;
  }

  function list() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => row.dataset.text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    found.textContent = `${shown} of ${rows.length} events`;
    if (sort) body.append(...rows.sort(compare));
    for (const button of table.tHead.querySelectorAll("button")) {
      const cell = button.closest("th");
      if (button.dataset.sort === sort) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
  }

  function remember() {
    const state = new URLSearchParams();
    if (filter.value) state.set("q", filter.value);
    if (sort) { state.set("sort", sort); state.set("dir", descending ? "desc" : "asc"); }
    const text = state.toString();
    history.replaceState(null, "", text ? `#events?${text}` : "#events");
  }

  function route() {
    const [name, query] = location.hash.slice(1).split("?");
    const page = /^(event|episode)-\d+$/.test(name) ? document.getElementById(name) : null;
    report.hidden = page !== null;
    view.hidden = page === null;
    view.replaceChildren();
    if (page) {
      view.append(page.content.cloneNode(true));
      const heading = view.querySelector("h1");
      document.title = `${heading.textContent} · pastcast`;
      window.scrollTo(0, 0);
      heading.focus({ preventScroll: true });
      return;
    }
    document.title = home;
    if (name === "events" && query !== undefined) {
      const state = new URLSearchParams(query);
      const wanted = state.get("sort") || "";
      filter.value = state.get("q") || "";
      sort = rows.length && wanted in rows[0].dataset ? wanted : "";
      descending = state.get("dir") !== "asc";
    }
    list();
    const section = name ? document.getElementById(name) : null;
    if (section) section.scrollIntoView();
    else window.scrollTo(0, 0);
  }

  filter.addEventListener("input", () => { list(); remember(); });
  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    descending = sort === button.dataset.sort ? !descending : numeric.has(button.dataset.sort);
    sort = button.dataset.sort;
    list();
    remember();
  });
  window.addEventListener("hashchange", route);
  route();
})();
