// The what-if page: sends its inputs, shows the charts that come back. An answer that is overtaken is not shown.
"use strict";

const form = document.getElementById("inputs");
const charts = document.getElementById("charts");
let sent = 0;
let timer = null;

function element(name) {
  return document.getElementById(name);
}

async function redraw() {
  const turn = ++sent;
  const query = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value !== "") query.set(name, value);
  charts.classList.add("old");
  let status = 0;
  let answer = { error: "the planner does not answer; is it still running?" };
  try {
    const reply = await fetch("/answer?" + query);
    status = reply.status;
    answer = await reply.json();
  } catch (error) {
    // answer says so
  }
  if (turn !== sent) return;
  element("error").textContent = answer.error || "";
  if (status !== 200) return;
  for (const name of ["budget", "limits", "pareto", "table"]) element(name).innerHTML = answer[name];
  element("words").textContent = answer.words.join("\n");
  element("shown").textContent = answer.shown;
  charts.classList.remove("old");
  document.body.dataset.drawn = turn;
  history.replaceState(null, "", "/?" + query);
}

function later() {
  clearTimeout(timer);
  timer = setTimeout(redraw, 120);
}

async function begin() {
  const choices = await (await fetch("/choices")).json();
  for (const [name, values] of Object.entries(choices))
    for (const value of values) element(name).append(new Option(value, value));
  for (const [name, value] of new URLSearchParams(location.search)) {
    const input = form.elements.namedItem(name);
    if (input && input.type === "checkbox") input.checked = value === "on";
    else if (input) input.value = value;
  }
  form.addEventListener("input", later);
  form.addEventListener("submit", (event) => event.preventDefault());
  redraw();
}

begin();
