// Before the first paint: the reader's own choice of light or dark, if there is one.
try {
  const chosen = localStorage.getItem("shapewright.appearance");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.appearance = chosen;
} catch {
  // Storage may be forbidden; the system's preference then counts.
}
