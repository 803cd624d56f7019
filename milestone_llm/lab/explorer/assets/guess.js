// "Guess the next step": what comes after the cursor is hidden. Asked is where something changes; the
// form begins with "as before". Then the answer is shown, with the rule that decided.

const guessing = { isOn: false, right: 0, asked: 0, isShown: false, index: 0 }; // steps; of which run
const guessedView = () => filled()[Math.min(guessing.index, filled().length - 1)];
const rowOf = (record, name) => record.batch.find((row) => row.request_id === name && row.phase !== "padding");

// Who could be in the next step: all that are there, and who comes before it is planned.
function candidates(run, at) {
  const ended = new Set(run.records[at].finished.map((entry) => entry.request_id));
  const { running, swapped, waiting } = queuesBefore(run, at + 1);
  const names = new Set([...running, ...swapped, ...waiting, ...run.records[at + 1].arrived]);
  return [...names].filter((name) => !ended.has(name));
}

// Tokens that a request has to compute; null where the trace does not say how long its prompt is.
function numUncomputed(run, at, name) {
  const { prompt, rows, spans } = requestOf(run, name);
  const before = rows.filter((each) => each.at <= at).map((each) => each.row);
  const last = before[before.length - 1];
  if (!last) return prompt?.num_tokens ?? (run.records[at].waiting.includes(name) ? null : 1); // a fork has its prompt's KV
  const known = Math.max(prompt?.num_tokens ?? 0, ...before.map((row) => rowEnd(row) + (row.sampled_token !== null)));
  if (spans.find(({ from, to }) => from <= at && at <= to)?.phase === "preempted") return known; // its KV memory is gone
  return prompt || last.sampled_token !== null ? known - rowEnd(last) : null;
}

// Tokens of the next step if it goes on like this one: who decodes decodes, who waits waits.
function asBefore(run, at, name) {
  const row = rowOf(run.records[at], name);
  if (!row || row.sampled_token !== null) return row ? 1 : 0;
  return Math.min(row.num_new_tokens, numUncomputed(run, at, name) ?? Infinity);
}

function answerOf(run, at, name) {
  const row = rowOf(run.records[at + 1], name);
  const victim = run.records[at + 1].preempted.find((each) => each.request_id === name);
  const tokens = row ? row.num_new_tokens : 0;
  return { row, victim, tokens, isChange: victim !== undefined || tokens !== asBefore(run, at, name) };
}

// The next step from here on that does not go on like the one before it: the one before it, or -1.
function nextChange(run, from) {
  for (let at = from; at + 1 < run.records.length; at++)
    if (candidates(run, at).some((name) => answerOf(run, at, name).isChange)) return at;
  return -1;
}

function whyOf(run, at, name) {
  const next = run.records[at + 1];
  const { row, victim } = answerOf(run, at, name);
  const ended = next.finished.find((each) => each.request_id === name);
  if (victim) return `${victim.reason}${ruleOfVictim(run, at, name)}`;
  if (row) return whyRuns(next, name, row);
  if (ended) return `ended before the step: ${ended.reason}`;
  if (asBefore(run, at, name) && !next.num_decode_tokens && next.num_prefill_tokens) return "prompts have the step to themselves, decode rows wait";
  return whyWaits(run, at + 1, name);
}

// Told where it holds: a reader's own scheduler may have another rule.
function ruleOfVictim(run, at, name) {
  const isUrgency = run.records[at].policy === "priority";
  const begun = (other) => run.marks.findLastIndex((mark) => mark.name === other && mark.at <= at && /admitted|resumed/.test(mark.kind));
  const rank = (other) => (isUrgency ? (requestOf(run, other).prompt?.priority ?? 0) * 1e6 + requestOf(run, other).index : begun(other));
  const stay = queuesBefore(run, at + 1).running.filter((other) => !answerOf(run, at, other).victim);
  if (stay.some((other) => rank(other) > rank(name))) return "";
  return isUrgency ? "; the least urgent one is preempted" : "; the one admitted last is preempted";
}

function whyRuns(next, name, row) {
  const cached = row.num_cached_tokens ? `; ${row.num_cached_tokens} more were found in the prefix cache` : "";
  const chunk = row.phase === "prefill" && row.sampled_token === null ? "; a chunk: the rest comes later" : "";
  const order = next.policy === "priority" ? "the most urgent one comes first" : "first come, first served";
  const turn = next.kv.unit === "token" ? "a new batch begins when the one before is done" : `${order}, and there are a row, tokens and memory for it`;
  if (next.admitted.includes(name)) return `admitted: ${turn}${cached}${chunk}`;
  const how = row.phase === "prefill" ? "all it had is computed again" : "its blocks came back from host memory";
  if (next.resumed.includes(name)) return `resumed: there is memory again, and ${how}${cached}${chunk}`;
  if (row.num_draft_tokens) return `it runs: one token, and ${row.num_accepted_tokens ?? 0} of ${row.num_draft_tokens} guesses that came true`;
  if (row.phase === "decode") return "it runs: one new token each step";
  return `its prompt is under way: it gets what the decode rows leave of the budget${chunk}`;
}

function drawGuess() {
  const panel = byId("guessing");
  panel.hidden = !guessing.isOn;
  document.body.classList.toggle("guessing", guessing.isOn);
  if (!guessing.isOn) return;
  guessing.isShown = false;
  const { run, at } = guessedView();
  const asked = nextChange(run, at);
  const until = asked < 0 ? "To the end" : `Up to step ${run.records[asked].step}`;
  const score = guessing.asked ? ` So far ${guessing.right} of ${plural(guessing.asked, "step")} right.` : "";
  const go = (to) => moveTo(stepBegin(run, to, state.axis));
  const parts = asked === at
    ? [el("h2", `What will step ${run.records[at + 1].step} compute?`), whichRun(),
      el("p.soft", `Filled in is "as before", but something changes. 0 tokens: it does not run. ${limits(run, at)}${score}`),
      el("div.scroll", el("table", el("tr", ["who", "to compute", "in the next step", "", "answer"].map((title) => el("th", title))), lines(run, at))),
      el("p.line", el("button.strong", { id: "check" }, "check"), el("button", { id: "skip", type: "button" }, "skip"))]
    : [el("h2", "Guess the next step"), whichRun(), el("p", `${until} all goes on as before.${score}`), asked < 0 ? "" : el("p", el("button.strong", "to the next change"))];
  panel.replaceChildren(el("form", parts));
  byId("skip")?.addEventListener("click", () => go(at + 1));
  panel.firstChild.addEventListener("submit", (event) => {
    event.preventDefault();
    if (asked !== at || guessing.isShown) go(asked === at ? at + 1 : asked);
    else showAnswers(run, at, panel);
  });
}

function whichRun() {
  if (filled().length < 2) return "";
  const select = el("select", { id: "guessed" }, options(filled().map(({ run }, index) => [index, titleOf(run)])));
  select.selectedIndex = guessing.index;
  select.addEventListener("change", () => drawGuess((guessing.index = select.selectedIndex)));
  return el("p", el("label", "run: ", select));
}

function limits(run, at) {
  const { kv } = run.records[at];
  const budget = run.meta.budget ? `A step has ${run.budget} tokens at most. ` : "";
  return kv.unit === "token" ? budget : `${budget}Free KV memory: ${plural(run.isAhead ? kv.total - run.usage[at].used : kv.free, kv.unit)}.`;
}

// Of very many requests those that change, and the first of the others.
function lines(run, at) {
  let room = 16;
  const shown = candidates(run, at).filter((name) => answerOf(run, at, name).isChange || room-- > 0);
  return shown.map((name) => {
    const need = numUncomputed(run, at, name);
    return el("tr", { "data-guess": name }, el("td", who(run, name)),
      el("td.soft", promptFacts(run, name, need === null ? "its prompt" : plural(need, "token"), !hasRunBefore(run, name, at + 1))),
      el("td", el("label", "tokens ", el("input", { type: "number", min: 0, max: 1000000, value: asBefore(run, at, name), "aria-label": `tokens of ${name}` }))),
      el("td", el("label", el("input", { type: "checkbox", "aria-label": `${name} is preempted` }), " preempted")), el("td.answer"));
  });
}

function showAnswers(run, at, panel) {
  const isRight = [...panel.querySelectorAll("[data-guess]")].map((line) => {
    const { tokens, victim } = answerOf(run, at, line.dataset.guess);
    const [number, box] = line.querySelectorAll("input");
    const isSame = Number(number.value) === tokens && box.checked === (victim !== undefined);
    const told = `${isSame ? "✓ right" : "✗ no"}: ${victim ? "preempted" : plural(tokens, "token")}`;
    line.querySelector(".answer").replaceChildren(el(isSame ? "span.right" : "span.wrong", told), ` – ${worded(run, whyOf(run, at, line.dataset.guess))}`);
    number.disabled = box.disabled = true;
    return isSame;
  });
  guessing.isShown = true;
  guessing.asked += 1;
  guessing.right += isRight.every(Boolean);
  panel.querySelector("#check").textContent = "go there";
  panel.querySelector("#check").focus();
  say(isRight.every(Boolean) ? "the step is right" : "not all of the step is right");
}
