// Light or dark: the system's preference, until the user chooses.
const root = document.documentElement;

function isDark() {
  if (root.classList.contains("dark")) return true;
  return !root.classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches;
}

export function switchTheme() {
  const next = isDark() ? "light" : "dark";
  root.classList.remove("light", "dark");
  root.classList.add(next);
  localStorage.setItem("edda-theme", next);
}

export function showThemeSwitch() {
  const button = document.querySelector("[data-theme-switch]");
  button.hidden = false;
  button.addEventListener("click", switchTheme);
}
