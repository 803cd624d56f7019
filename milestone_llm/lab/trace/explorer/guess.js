// "Guess the next step": what comes after the cursor is hidden; one says who will run, with how many
// tokens, and who will be preempted. Then it is shown, with the rule that decided.

const guessing = { isOn: false, right: 0, asked: 0, isShown: false };

// Who could be in the next step: all that are there, and who comes before it is planned.
function candidates(run, at) {
  const [record, next] = [run.records[at], run.records[at + 1]];
  const ended = new Set(record.finished.map((entry) => entry.request_id));
  const names = [...record.running, ...record.swapped, ...record.waiting, ...next.arrived];
  return [...new Set(names)].filter((name) => !ended.has(name)).slice(0, 16);
}

// What becomes of a request in the next step, and why.
function answerOf(run, at, name) {
  const next = run.records[at + 1];
  const row = next.batch.find((each) => each.request_id === name && each.phase !== "padding");
  const preempted = next.preempted.find((each) => each.request_id === name);
  const ended = next.finished.find((each) => each.request_id === name);
  const tokens = row ? row.num_new_tokens : 0;
  if (preempted) return { tokens, isPreempted: true, why: `preempted: ${preempted.reason}` };
  if (!row && ended) return { tokens, isPreempted: false, why: `ended before the step: ${ended.reason}` };
  if (!row) return { tokens, isPreempted: false, why: `no row: ${whyWaits(run, at + 1, name)}` };
  return { tokens, isPreempted: false, why: whyRuns(run, at, name, row, next) };
}

function whyRuns(run, at, name, row, next) {
  const cached = row.num_cached_tokens ? `; ${row.num_cached_tokens} more were found in the prefix cache` : "";
  const goesOn = row.phase === "prefill" && row.sampled_token === null;
  const chunk = goesOn ? "; a chunk: the rest of the prompt comes later" : "";
  if (next.admitted.includes(name)) return `admitted: a row, tokens and KV memory are there for it${cached}${chunk}`;
  if (next.resumed.includes(name)) {
    const how = row.phase === "prefill" ? "all it had is computed again" : "its blocks came back from host memory";
    return `resumed: there is memory again, and ${how}${cached}${chunk}`;
  }
  if (row.phase === "decode") return "it runs already: one new token each step";
  return `its prompt is under way: as many tokens as the budget has left${chunk}`;
}

// Tokens that a request has not computed yet, as far as the trace tells: its next rows up to a token.
function numUncomputed(run, at, name) {
  const rows = requestOf(run, name).rows.filter((each) => each.at > at).map((each) => each.row);
  let count = 0;
  for (const row of rows) {
    count += row.num_new_tokens + row.num_cached_tokens;
    if (row.sampled_token !== null || row.phase === "padding") break;
  }
  return count;
}

function drawGuess(view) {
  const panel = byId("guessing");
  const { run, at } = view;
  panel.hidden = !guessing.isOn;
  document.body.classList.toggle("guessing", guessing.isOn);
  if (!guessing.isOn) return;
  if (at + 1 >= run.records.length) {
    panel.replaceChildren(el("h2", "Guess the next step"), el("p", `This was the last step. ${scoreText()} Go back to guess again.`));
    return;
  }
  const limit = run.meta.budget ? `A step has ${run.budget} tokens at most. ` : "";
  const { kv } = run.records[at];
  const memory = kv.unit === "token" ? "" : `Free KV memory: ${plural(kv.free, kv.unit)}. `;
  const rows = candidates(run, at).map((name) => {
    const need = numUncomputed(run, at, name);
    return el("tr", { "data-guess": name }, el("td", who(run, name)), el("td.soft", need ? `${plural(need, "token")} to compute` : "–"),
      el("td", el("label", "tokens ", el("input", { type: "number", min: 0, max: 1000000, value: 0, "aria-label": `tokens of ${name}` }))),
      el("td", el("label", el("input", { type: "checkbox", "aria-label": `${name} is preempted` }), " preempted")), el("td.answer"));
  });
  const head = el("tr", ["who", "has", "in the next step", "", "answer"].map((title) => el("th", title)));
  const skip = el("button", { type: "button" }, "skip");
  const form = el("form", el("h2", `What will step ${run.records[at + 1].step} compute?`),
    el("p.soft", `0 tokens: it does not run. ${limit}${memory}${scoreText()}`),
    el("div.scroll", el("table", head, rows)), el("p.key", el("button.strong", { id: "check" }, "check"), skip));
  panel.replaceChildren(form);
  guessing.isShown = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (guessing.isShown) stepBy(1);
    else showAnswers(view, panel);
  });
  skip.addEventListener("click", () => stepBy(1));
}

function showAnswers(view, panel) {
  guessing.isShown = true;
  let right = 0;
  const lines = [...panel.querySelectorAll("[data-guess]")];
  for (const line of lines) {
    const { tokens, isPreempted, why } = answerOf(view.run, view.at, line.dataset.guess);
    const [number, box] = line.querySelectorAll("input");
    const isRight = Number(number.value) === tokens && box.checked === isPreempted;
    right += isRight;
    const what = isPreempted ? "preempted" : plural(tokens, "token");
    const told = el(isRight ? "span.right" : "span.wrong", `${isRight ? "✓ right" : "✗ no"}: ${what}`);
    line.querySelector(".answer").replaceChildren(told, ` – ${worded(view.run, why)}`);
    number.disabled = box.disabled = true;
  }
  guessing.right += right;
  guessing.asked += lines.length;
  panel.querySelector("#check").textContent = "go there";
  panel.querySelector("#check").focus();
  say(`${right} of ${lines.length} right`);
}

function scoreText() {
  return guessing.asked ? `So far ${guessing.right} of ${guessing.asked} right. ` : "";
}
