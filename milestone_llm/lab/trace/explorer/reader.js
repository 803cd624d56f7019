// From the lines of a trace to whole step records. The lines hold what changed since the record
// before; milestone_llm/lab/trace/compact.py writes them and says how.

const QUEUES = ["waiting", "running", "swapped"];

function makeRestorer() {
  let last = null;
  const rows = new Map(); // the last row of each request

  function wholeRow([name, token, ...blocks]) {
    const before = rows.get(name);
    return {
      request_id: name,
      phase: "decode",
      start: before.start + before.num_new_tokens,
      num_new_tokens: 1,
      num_cached_tokens: 0,
      sampled_token: token,
      blocks: blocks.length ? before.blocks.concat(blocks) : before.blocks,
    };
  }

  function wholeQueue(change, before) {
    if (change === undefined) return before;
    if (Array.isArray(change)) return change;
    const less = new Set(change.less);
    return before.filter((name) => !less.has(name)).concat(change.more);
  }

  return function restore(data) {
    if (data.changes_since !== undefined) {
      for (const queue of QUEUES) data[queue] = wholeQueue(data[queue], last[queue]);
      data.batch = data.batch.map((row) => (Array.isArray(row) ? wholeRow(row) : row));
    }
    for (const row of data.batch) rows.set(row.request_id, row);
    last = data;
    return data;
  };
}

// The lines inside the page are compressed: base64 of gzip.
async function inflate(base64) {
  const bytes = Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// The first line says what the trace itself does not: a label, limits, text of tokens.
async function readRun(base64) {
  const text = await inflate(base64);
  const [first, ...lines] = text.split("\n").filter(Boolean);
  const run = makeRun(JSON.parse(first));
  const restore = makeRestorer();
  for (const line of lines) addRecord(run, restore(JSON.parse(line)));
  return run;
}
