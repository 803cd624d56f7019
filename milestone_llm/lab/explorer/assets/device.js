// What host and device did when, where the trace has the device's own times. A step is seen from its
// plan until its tokens are settled, with what else went on then, and some of its kernels enlarged.

const HOST_KINDS = { plan: "prefill", launch: "decode", wait: "wait", settle: "update" };
const MOST_ENLARGED = 10;

const inTime = (us) => (us < 1000 ? `${us.toFixed(us < 10 ? 1 : 0)} µs` : `${(us / 1000).toFixed(2)} ms`);
const kernelName = (name) => (name.startsWith("nvjet") ? `GEMM ${name}` : name || "unnamed"); // cuBLAS's
const isMixed = (record) => record.num_prefill_tokens > 0 && record.num_decode_tokens > 0;
const isLike = (one, other) => one.device.is_graph === other.device.is_graph && isMixed(one) === isMixed(other) && !one.num_decode_tokens === !other.num_decode_tokens;

function drawDevice({ run, at, box }) {
  if (!views.some((view) => view.run.records[0]?.device)) return;
  if (!box.querySelector(".device")) box.querySelector(".timeline").after(el("div.card.device"));
  const parts = run.records[at].device ? deviceParts(run, at) : [el("p.soft", "This trace has no device times.")];
  const isOpen = box.querySelector(".device details")?.open;
  box.querySelector(".device").replaceChildren(el("h3", "Host and device, under a profiler"), ...parts);
  if (isOpen) box.querySelector(".device details")?.setAttribute("open", "");
}

function deviceParts(run, at) {
  const here = run.records[at];
  const { host, start_us, us, busy_us, is_graph, num_launches, num_kernels } = here.device;
  const length = 1.02 * Math.max(start_us + us, ...host.map((part) => part.start_us + part.us));
  const near = run.records.slice(Math.max(0, at - 2), at + (guessing.isOn ? 1 : 3));
  const shift = (record) => 1e6 * (record.start_s - here.start_s);
  const told = near.flatMap((record) => record.device.host.map((part) => [HOST_KINDS[part.name], `${part.name} ${record.step}`, shift(record) + part.start_us, part.us]));
  const ran = near.flatMap((record) => {
    const { device } = record;
    const busy = Math.round((100 * device.busy_us) / device.us);
    const whole = { ...device, name: `step ${record.step}: ${plural(device.num_kernels, "kernel")}, ${busy} % busy`, busy };
    const parts = device.kernels.length ? device.kernels : [whole];
    return parts.map((part) => [record === here ? "prefill" : "decode", kernelName(part.name), shift(record) + part.start_us, part.us, part.busy]);
  });
  const before = run.records[at - 1];
  const idle = before && Math.max(0, start_us - shift(before) - before.device.start_us - before.device.us);
  const like = run.records.slice(0, at + 1).findLast((record) => record.device.kernels.length && isLike(record, here));
  const facts = [
    [isMixed(here) ? "a mixed step" : here.num_decode_tokens ? "decode rows" : "prompts", is_graph ? ", one CUDA graph" : ", kernel by kernel"],
    named(num_launches, num_launches === 1 ? "launch" : "launches"), named(num_kernels, "kernels and copies"),
    [el("b", inTime(busy_us)), " busy"], [el("b", inTime(us - busy_us)), " in gaps"], before ? ["before it the device waited ", el("b", inTime(idle))] : "",
  ];
  return [
    lane("host", told, 0, length), lane("device", ran, 0, length),
    el("p.legend", Object.entries(HOST_KINDS).map(([name, kind]) => el("span", el(`i.${kind}`), name)), el("span", el("b", inTime(length)), " in all")),
    el("p.legend", facts.map((fact) => el("span", fact))), ...(like ? enlarged(like) : []),
  ];
}

// Parts are `[kind, title, begin, microseconds, busy]`: in percent, all of it if it is not said.
function lane(name, parts, from, length) {
  const drawn = parts.flatMap(([kind, title, begin, us, busy = 100]) => {
    const [left, right] = [begin, begin + us].map((time) => Math.max(0, Math.min(1, (time - from) / length)));
    if (right === left) return [];
    const style = { left: `${100 * left}%`, width: `${100 * (right - left)}%` };
    const part = el("div", { title: `${title}: ${inTime(us)}`, style }, el(`i.${kind}`, { style: { height: `${busy}%` } }));
    if (right - left > 0.07) part.append(el("span", title));
    return part;
  });
  return el("div.lane", { role: "img", "aria-label": `what the ${name} did` }, el("b", name), el("div", drawn));
}

function enlarged({ step, device: { kernels } }) {
  const some = kernels.slice(kernels.length / 2, kernels.length / 2 + MOST_ENLARGED);
  const last = some[some.length - 1];
  const length = last.start_us + last.us - some[0].start_us;
  const parts = some.map(({ name, start_us, us }, index) => [index % 2 ? "odd" : "decode", kernelName(name), start_us, us]);
  const sums = new Map();
  for (const { name, us } of kernels) sums.set(name, [(sums.get(name)?.[0] ?? 0) + 1, (sums.get(name)?.[1] ?? 0) + us]);
  const costly = [...sums].sort(([, one], [, other]) => other[1] - one[1]).slice(0, 8);
  const rows = costly.map(([name, [count, us]]) => el("tr", el("td", kernelName(name)), el("td.n", count), el("td.n", inTime(us))));
  return [
    lane("kernels", parts, some[0].start_us, length), el("p.legend", `${plural(some.length, "kernel")} amid step ${step}: ${inTime(length)}`),
    el("details", el("summary", `the costliest kernels of step ${step}`), el("table", el("tr", el("th", "kernel"), el("th.n", "launches"), el("th.n", "in all")), rows)),
  ];
}
