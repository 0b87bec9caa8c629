// The theme: light, dark, or the system's; stored in this browser.
import { signal } from "@preact/signals";

export type Theme = "system" | "light" | "dark";
const KEY = "specdec-theme";

export const theme = signal<Theme>(remembered());

export function applyTheme(chosen: Theme = theme.value): void {
  theme.value = chosen;
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  try {
    localStorage.setItem(KEY, chosen);
  } catch {
    // Storage is disabled.
  }
}

function remembered(): Theme {
  try {
    const found = localStorage.getItem(KEY);
    return found === "light" || found === "dark" ? found : "system";
  } catch {
    return "system";
  }
}
