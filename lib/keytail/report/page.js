// Sorts a table when one of its headings is clicked, and filters long tables. Without the script all rows are shown.
"use strict";
for (const table of document.querySelectorAll("table.rows")) {
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const value = (row, n) => row.cells[n].dataset.v ?? row.cells[n].textContent;
  const sort = (n) => {
    const up = heads[n].getAttribute("aria-sort") === "descending" ? 1 : -1;
    const numbers = rows.every((row) => value(row, n) === "" || !isNaN(value(row, n)));
    const by = numbers ? (a, b) => a - b : (a, b) => a.localeCompare(b, undefined, { numeric: true });
    rows.sort((a, b) => up * by(value(a, n), value(b, n)));
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[n].setAttribute("aria-sort", up === 1 ? "ascending" : "descending");
    body.append(...rows);
  };
  heads.forEach((head, n) => {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(n));
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(n); });
  });
  if (rows.length > 15) {
    const filter = document.createElement("input");
    filter.className = "filter";
    filter.type = "search";
    filter.placeholder = `filter ${rows.length} rows`;
    filter.setAttribute("aria-label", "filter rows");
    filter.addEventListener("input", () => {
      const wanted = filter.value.toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
    table.parentElement.before(filter);
  }
}
addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("#reasons details, #run details")) folded.open = true;
});
