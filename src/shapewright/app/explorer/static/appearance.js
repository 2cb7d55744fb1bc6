// Apply the user's choice of light or dark before the first paint.
try {
  const chosen = localStorage.getItem("shapewright.appearance");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.appearance = chosen;
} catch {
  // Storage may be blocked; the system preference applies.
}
