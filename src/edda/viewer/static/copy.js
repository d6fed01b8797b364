// One click copies. The buttons are hidden until there is somebody to serve them.
export function offerCopies(within = document) {
  if (!navigator.clipboard) return;
  for (const button of within.querySelectorAll("[data-copy][hidden]")) button.hidden = false;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  event.preventDefault();
  await navigator.clipboard.writeText(button.dataset.copy);
  button.classList.add("copied");
  setTimeout(() => button.classList.remove("copied"), 900);
});
