// Loaded before the page is drawn, so that it never flashes in the other colours.
const chosen = localStorage.getItem("theme");
if (chosen) document.documentElement.dataset.theme = chosen;
