// What the browser keeps. Without storage, as in some private windows, nothing is kept and all else works.

const PREFIX = "tfexport.";

export function remembered(name, fallback) {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // It holds until the page is left.
  }
}

// The theme is plain text: theme.js reads it before any module is there.
export function rememberTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(`${PREFIX}theme`, theme);
  } catch {
    // As above.
  }
}

let key = null;

// An API key is a secret: it is kept for this tab alone.
export function apiKey() {
  try {
    key ??= sessionStorage.getItem(`${PREFIX}key`);
  } catch {
    // As above.
  }
  return key;
}

export function setApiKey(value) {
  key = value;
  try {
    sessionStorage.setItem(`${PREFIX}key`, value);
  } catch {
    // As above.
  }
}
