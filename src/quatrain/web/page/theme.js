// Light, dark, or as the system says; set before the first paint, so that nothing flashes.

const NAMES = { auto: "as the system", light: "light", dark: "dark" };
const KEY = "quatrain-theme";

export function theme() {
  try {
    return localStorage.getItem(KEY) in NAMES ? localStorage.getItem(KEY) : "auto";
  } catch {
    return "auto"; // a browser that keeps nothing
  }
}

function show(name) {
  document.documentElement.dataset.theme = name;
  document.dispatchEvent(new Event("themechange"));
}

export function themeButton(button) {
  const told = () => {
    button.textContent = { auto: "◐", light: "☀", dark: "☾" }[theme()];
    button.setAttribute("aria-label", `Colours: ${NAMES[theme()]}. Change`);
    button.title = `Colours: ${NAMES[theme()]}`;
  };
  button.addEventListener("click", () => {
    const names = Object.keys(NAMES);
    const next = names[(names.indexOf(theme()) + 1) % names.length];
    try {
      localStorage.setItem(KEY, next);
    } catch {
      return;
    }
    show(next);
    told();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(theme()));
  told();
}

show(theme());
