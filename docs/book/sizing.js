// Which GPU for which model and load: the sliders of docs/sizing.md.
//
// `sizes` is `size` of milestone_llm/lab/playground/sizing.py for each GPU; a test compares them.

function sizes(data, load) {
  const shape = data.models[load.model];
  const weights = shape.weights * load.weight_bytes;
  const kvBytes = Math.trunc(shape.kv_numbers * load.kv_bytes);
  return Object.entries(data.gpus).map(([gpu, card]) => {
    const step = (positions, outputs, scores, read) =>
      data.overhead_s +
      (load.weight_bytes * (shape.layer_weights + shape.head_weights) + kvBytes * read) / (data.memory_share * card.bandwidth) +
      (2 * (shape.layer_weights * positions + shape.head_weights * outputs) + 4 * shape.query_size * scores) / (data.arithmetic_share * card.operations);
    const kv_tokens = Math.max(0, Math.floor((data.kept * card.memory - weights) / kvBytes));
    const rows = Math.min(load.rows, Math.floor(kv_tokens / (load.prompt + load.output)));
    if (!rows) return { gpu, weights, kv_tokens, rows, ttft: 0, tpot: 0, tokens: 0, requests: 0 };
    const ttft = step(load.prompt, 1, load.prompt ** 2 / 2, load.prompt);
    const context = rows * (load.prompt + load.output / 2);
    const tpot = step(rows, rows, context, context);
    const requests = 1 / (ttft + (load.output * tpot) / rows);
    return { gpu, weights, kv_tokens, rows, ttft, tpot, tokens: requests * load.output, requests };
  });
}

function connectSizing(part) {
  const data = JSON.parse(part.querySelector("script").textContent);
  const form = part.querySelector("form");
  const body = part.querySelector("tbody");
  const told = part.querySelector(".told");
  const button = part.querySelector("button");
  const count = (value) => Math.round(value).toLocaleString("en");
  const load = () => Object.fromEntries(Object.keys(data.load).map((name) => [name, name === "model" ? form.model.value : Number(form[name].value)]));
  const cells = (line, texts) => line.append(...texts.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
  let version = 0; // of the load: what a run finds for an older one is not shown

  function draw() {
    version += 1;
    for (const output of form.querySelectorAll("output")) output.textContent = count(form[output.htmlFor].value);
    const found = sizes(data, load());
    const kv = data.models[form.model.value].kv_numbers * Number(form.kv_bytes.value);
    told.textContent = `${(found[0].weights / 1e9).toFixed(1)} GB of weights, ${count(kv / 1e3)} KB of KV a token`;
    body.replaceChildren(...found.map((each) => {
      const line = document.createElement("tr");
      line.dataset.gpu = each.gpu;
      const head = Object.assign(document.createElement("th"), { textContent: data.gpus[each.gpu].title, scope: "row" });
      line.append(head);
      cells(line, [count(each.kv_tokens), count(each.rows)]);
      cells(line, each.rows ? [(1e3 * each.ttft).toFixed(1), (1e3 * each.tpot).toFixed(1), count(each.tokens), each.requests.toFixed(1), "", ""] : ["too little memory", "", "", "", "", ""]);
      return line;
    }));
  }

  let worker;
  const waiting = new Map();
  function ask(body) {
    if (!worker) {
      worker = new Worker(`${part.dataset.play}/worker.js`, { type: "module" });
      worker.onerror = () => (told.textContent = "Python cannot be started in this browser");
      worker.onmessage = ({ data: { id, failure, isFine, text } }) => {
        if (failure) told.textContent = `Python cannot be started: ${failure}`;
        waiting.get(id)?.(isFine ? JSON.parse(text) : { problem: text });
      };
    }
    const id = waiting.size + 1;
    worker.postMessage({ id, path: "/sizing", body });
    return new Promise((resolve) => waiting.set(id, resolve));
  }

  async function serve() {
    draw();
    const own = version;
    const before = told.textContent;
    for (const { gpu, rows } of sizes(data, load())) {
      if (!rows) continue;
      told.textContent = `${before}. Serving on ${data.gpus[gpu].title} …`;
      const { problem, figures, link } = await ask({ gpu, rate: Number(form.rate.value), load: load() });
      if (own !== version) return; // another run has begun, or the load has changed
      if (problem) return (told.textContent = problem);
      const [ttft, tpot] = [...body.querySelector(`[data-gpu="${gpu}"]`).cells].slice(-2);
      const whole = Object.assign(document.createElement("a"), { href: `${part.dataset.play}/index.html${link}`, textContent: figures.ttft.toFixed(2) });
      ttft.replaceChildren(whole);
      tpot.textContent = figures.tpot.toFixed(1);
    }
    told.textContent = before;
  }

  const models = Object.entries(data.models).map(([value, { title }]) => new Option(title, value));
  form.model.replaceChildren(...models);
  for (const [name, value] of Object.entries(data.load)) form[name].value = value;
  form.addEventListener("input", draw);
  form.addEventListener("submit", (event) => event.preventDefault());
  button.hidden = form.rate.parentElement.hidden = !part.dataset.play || location.protocol === "file:";
  button.onclick = serve;
  draw();
}

if (typeof document !== "undefined") connectSizing(document.getElementById("sizing"));
