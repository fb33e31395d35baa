// Comfort only: every drawing and number is in the page without it.
"use strict";
const root = document.documentElement, tip = document.getElementById("tip");

const theme = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
const label = () => {
  theme.textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
};
theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
dark.addEventListener("change", label);
label();

// Tips: what a screen reader hears of a mark is what the mouse shows.
function show(stop, x, y) {
  tip.textContent = stop.getAttribute("aria-label");
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18) + "px";
  mark(stop);
}
function hide() { tip.hidden = true; mark(null); }
// The same task in the other panel.
function mark(stop) {
  for (const old of document.querySelectorAll(".same")) old.classList.remove("same");
  const step = stop && stop.dataset.k !== undefined && stop.closest(".step[data-pairs]");
  if (step) for (const same of step.querySelectorAll(`[data-k="${stop.dataset.k}"]`)) same.classList.add("same");
}
document.addEventListener("mousemove", (event) => {
  const stop = event.target.closest && event.target.closest(".stop");
  if (stop) show(stop, event.clientX, event.clientY);
  else if (!document.activeElement.closest(".stop")) hide();
});
document.addEventListener("focusin", (event) => {
  const stop = event.target.closest(".stop");
  if (!stop) return hide();
  const box = stop.getBoundingClientRect();
  show(stop, Math.max(0, box.left), Math.min(box.bottom - 14, innerHeight - 60));
});

// One stop of each plot is in the order of tabs; arrows move between the others.
const stops = (plot) => [...plot.querySelectorAll(".stop")];
for (const plot of document.querySelectorAll(".plot, .panel")) {
  stops(plot).forEach((stop, index) => stop.setAttribute("tabindex", index ? "-1" : "0"));
  plot.addEventListener("keydown", (event) => {
    const all = stops(plot), at = all.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (event.key === "Escape") { hide(); return; }
    if (to === undefined || !all[to]) return;
    event.preventDefault();
    all[at].setAttribute("tabindex", "-1");
    all[to].setAttribute("tabindex", "0");
    all[to].focus();
  });
}

// Which step, and how wide.
const select = document.getElementById("step");
if (select) {
  const steps = document.querySelectorAll(".step"), zoomIn = document.getElementById("in"), zoomOut = document.getElementById("out");
  let zoom = 1;
  const apply = () => {
    for (const step of steps) {
      step.hidden = step.dataset.step !== select.value;
      step.style.setProperty("--zoom", zoom);
    }
    zoomOut.disabled = zoom <= 1;
    zoomIn.disabled = zoom >= 32;
  };
  select.addEventListener("change", apply);
  zoomIn.addEventListener("click", () => { zoom *= 2; apply(); });
  zoomOut.addEventListener("click", () => { zoom /= 2; apply(); });
  apply();
}
