"use strict";
(() => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const toggle = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const name = () => { toggle.textContent = isDark() ? "Light" : "Dark"; };
  toggle.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  dark.addEventListener("change", name);
  toggle.hidden = false;
  name();

  const picture = document.getElementById("mesh-picture"), told = document.getElementById("mesh-told");
  const controls = document.getElementById("mesh-controls");
  if (!controls) return;
  const axes = JSON.parse(document.getElementById("mesh-axes").dataset.axes);
  const ranks = [...picture.querySelectorAll(".rank")], buttons = [...controls.querySelectorAll("button")];
  const start = told.textContent;
  let axis = buttons[0].dataset.axis, last = ranks[0], pinned = null;

  // The ranks that differ from one on this axis alone, in the order of dslpar.core.mesh.
  const peers = (rank, along) => axes[along].reduce((found, [size, stride]) => found.flatMap((each) =>
    Array.from({ length: size }, (_, index) => each + (index - Math.floor(rank / stride) % size) * stride)), [rank]);

  const mark = (cell, along) => {
    const group = cell ? peers(Number(cell.dataset.rank), along) : [], members = new Set(group);
    picture.classList.toggle("marked", cell !== null);
    for (const each of ranks) {
      each.classList.toggle("peer", members.has(Number(each.dataset.rank)));
      each.classList.toggle("chosen", each === cell);
    }
    const more = group.length > 32 ? `, ... (${group.length} in all)` : "";
    told.textContent = cell
      ? `${cell.getAttribute("aria-label")}. Its group on axis ${along}: ${group.slice(0, 32).join(", ")}${more}` : start;
  };
  const choose = (cell) => { last = cell; mark(cell, axis); };
  const restore = () => mark(pinned, axis);

  picture.addEventListener("pointerover", (event) => {
    const cell = event.target.closest(".rank");
    if (cell) choose(cell);
  });
  picture.addEventListener("pointerleave", restore);
  picture.addEventListener("focusin", (event) => choose(event.target.closest(".rank")));
  picture.addEventListener("focusout", restore);
  picture.addEventListener("click", (event) => {
    const cell = event.target.closest(".rank");
    pinned = cell === pinned ? null : cell;
    if (cell) choose(cell); else restore();
  });
  picture.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -8, ArrowDown: 8 };
    const at = ranks.indexOf(event.target);
    const next = event.key in steps ? at + steps[event.key] : { Home: 0, End: ranks.length - 1 }[event.key];
    if (at < 0 || !ranks[next]) return;
    event.preventDefault();
    ranks[at].tabIndex = -1;
    ranks[next].tabIndex = 0;
    ranks[next].focus();
  });
  for (const button of buttons) {
    const along = button.dataset.axis;
    const preview = () => mark(pinned ?? last, along);
    button.addEventListener("pointerenter", preview);
    button.addEventListener("focus", preview);
    button.addEventListener("pointerleave", restore);
    button.addEventListener("blur", restore);
    button.addEventListener("click", () => {
      axis = along;
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
      preview();
    });
  }
  controls.hidden = false;
})();
