// One box that ticks all of them.
export function offerChoices(within = document) {
  for (const box of within.querySelectorAll("[data-all][hidden]")) box.hidden = false;
}

document.addEventListener("change", (event) => {
  const box = event.target.closest("[data-all]");
  if (!box) return;
  for (const one of box.closest("table").querySelectorAll("tbody input[type=checkbox]")) one.checked = box.checked;
});
