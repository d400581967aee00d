"use strict";
(() => {
  const tip = document.getElementById("tip");
  let pinned = null;

  const show = (block) => {
    tip.replaceChildren(block.querySelector(":scope > template").content.cloneNode(true));
    tip.hidden = false;
    document.querySelectorAll(".block.seen").forEach((other) => other.classList.remove("seen"));
    block.classList.add("seen");
  };
  // Wide: the last block stays described beside the model. Narrow: the sheet would cover the page, so it goes.
  const narrow = matchMedia("(max-width: 980px)");
  const hide = () => { if (!pinned && narrow.matches) tip.hidden = true; };
  const pin = (block) => {
    document.querySelectorAll(".block.on").forEach((other) => other.classList.remove("on"));
    pinned = pinned === block ? null : block;
    tip.classList.toggle("pinned", pinned !== null);
    if (pinned) { pinned.classList.add("on"); show(pinned); } else { hide(); }
  };

  for (const block of document.querySelectorAll(".block")) {
    block.addEventListener("mouseover", (event) => { event.stopPropagation(); if (!pinned) show(block); });
    block.addEventListener("mouseleave", hide);
    block.addEventListener("focus", () => { if (!pinned && block.matches(":focus-visible")) show(block); });
    block.addEventListener("blur", hide);
    block.addEventListener("click", (event) => { event.stopPropagation(); pin(block); });
    block.addEventListener("keydown", (event) => {
      if (event.target === block && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); pin(block); }
    });
  }
  const unpin = () => { if (pinned) pin(pinned); };
  document.addEventListener("click", (event) => { if (!tip.contains(event.target)) unpin(); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") unpin(); });
  addEventListener("scroll", hide, { passive: true });
  const first = document.querySelector(".block.refused, .block.rewritten.branch") || document.querySelector(".block");
  if (first && !narrow.matches) show(first);

  const rows = document.getElementById("rows");
  if (!rows) return;
  const MOST = 500;
  const data = JSON.parse(document.getElementById("data").textContent);
  const text = data.map((row) => row.join(" ").toLowerCase());
  const search = document.getElementById("search");
  const shown = document.getElementById("shown");
  let outcome = "";

  const draw = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = data.filter((row, i) => (!outcome || row[3] === outcome) && words.every((w) => text[i].includes(w)));
    rows.replaceChildren(...found.slice(0, MOST).map((row) => {
      const line = document.createElement("tr");
      row.forEach((value, column) => {
        const cell = line.insertCell();
        cell.textContent = value;
        if (column === 0 || column === 4) cell.className = "path";
        if (column === 3) cell.className = `outcome-${value}`;
      });
      return line;
    }));
    const more = found.length > MOST ? `, the first ${MOST} shown` : "";
    shown.textContent = `${found.length.toLocaleString("en")} of ${data.length.toLocaleString("en")}${more}`;
  };
  const counts = new Map();
  for (const row of data) counts.set(row[3], (counts.get(row[3]) || 0) + 1);
  for (const [name, count] of counts) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${name} ${count.toLocaleString("en")}`;
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      outcome = outcome === name ? "" : name;
      for (const other of button.parentElement.children) {
        other.setAttribute("aria-pressed", String(other === button && outcome === name));
      }
      draw();
    });
    document.getElementById("outcomes").append(button);
  }
  search.addEventListener("input", draw);
  draw();
})();
