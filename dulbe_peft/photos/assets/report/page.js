// A click on the header of a column sorts the table. Without JavaScript, the page can still be read.
for (const head of document.querySelectorAll("table.sort thead th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const body = head.closest("table").tBodies[0];
    const value = row => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent.trim();
    const number = text => parseFloat(text.replaceAll(",", ""));
    const compare = (a, b) => {
      const [x, y] = [number(a), number(b)];
      return isNaN(x) || isNaN(y) ? isNaN(y) - isNaN(x) || a.localeCompare(b) : x - y;
    };
    const down = head.ariaSort === "ascending";
    const rows = [...body.rows].sort((a, b) => (down ? -1 : 1) * compare(value(a), value(b)));
    for (const other of head.parentElement.cells) other.ariaSort = null;
    head.ariaSort = down ? "descending" : "ascending";
    body.append(...rows);
  });
}
