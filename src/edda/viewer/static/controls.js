// Copy buttons, and checkboxes that check all rows of a table: hidden until this script can handle them.
export function showControls(within = document) {
  const canCopy = Boolean(navigator.clipboard);
  for (const control of within.querySelectorAll("[data-all][hidden], [data-copy][hidden]")) {
    control.hidden = "copy" in control.dataset && !canCopy;
  }
}

document.addEventListener("change", (event) => {
  const box = event.target.closest("[data-all]");
  if (!box) return;
  for (const row of box.closest("table").querySelectorAll("tbody input[type=checkbox]")) row.checked = box.checked;
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  event.preventDefault();
  await navigator.clipboard.writeText(button.dataset.copy);
  button.classList.add("copied");
  setTimeout(() => button.classList.remove("copied"), 900);
});
