// Runs before the page is drawn, so that it never flashes in the other colours.
const kept = localStorage.getItem("edda-theme");
if (kept) document.documentElement.classList.add(kept);
