// Runs before the first paint, so that a dark page does not flash light.
{
  const KEY = "tfexport.theme";
  let chosen = "system";
  try {
    chosen = localStorage.getItem(KEY) ?? chosen;
  } catch {
    // No storage: the theme of the system.
  }
  document.documentElement.dataset.theme = chosen;
}
