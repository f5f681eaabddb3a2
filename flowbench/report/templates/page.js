// Filters, and the details of a cell. Without it the page shows everything.
"use strict";
document.documentElement.classList.add("js");

document.addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector(".filters");
  const rows = [...document.querySelectorAll("tr.row[data-engine]")];
  const others = [...document.querySelectorAll("figure[data-model], article[data-model]")];

  function show(row, open) {
    const button = row.querySelector(".toggle");
    button.setAttribute("aria-expanded", String(open));
    row.nextElementSibling.classList.toggle("open", open);
  }

  function filter() {
    const wanted = form ? [...form.querySelectorAll("select")].filter((select) => select.value) : [];
    let shown = 0;
    for (const row of rows) {
      const out = wanted.some((select) => row.dataset[select.name] !== select.value);
      row.classList.toggle("out", out);
      row.nextElementSibling.classList.toggle("out", out);
      shown += !out;
    }
    for (const other of others) {
      const has = { model: [other.dataset.model], world: other.dataset.worlds.split(" ") };
      other.classList.toggle("out", wanted.some((select) => has[select.name] && !has[select.name].includes(select.value)));
    }
    const engine = wanted.find((select) => select.name === "engine");
    for (const line of document.querySelectorAll("figure g[data-engine]")) {
      line.style.opacity = !engine || line.dataset.engine === engine.value || line.classList.contains("c0") ? 1 : 0.12;
    }
    const output = form && form.querySelector("output");
    if (output) output.value = shown === rows.length ? `all ${shown} cells` : `${shown} of ${rows.length} cells`;
  }

  function follow() {
    const target = location.hash.startsWith("#cell-") && document.getElementById(location.hash.slice(1));
    if (!target) return;
    if (target.classList.contains("out")) { form.reset(); filter(); }
    show(target, true);
    target.scrollIntoView({ block: "start" });
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest(".toggle");
    if (button) show(button.closest("tr"), button.getAttribute("aria-expanded") !== "true");
  });
  if (form) {
    form.addEventListener("change", filter);
    form.addEventListener("reset", () => setTimeout(filter));
    form.addEventListener("submit", (event) => event.preventDefault());
  }
  addEventListener("hashchange", follow);
  filter();
  follow();
});
