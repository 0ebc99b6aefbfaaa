if (location.search === "?wrong") {
  const field = document.querySelector("input");
  field.setAttribute("aria-invalid", "true");
  document.querySelector("#wrong").hidden = false;
}
