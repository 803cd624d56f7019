// The page asks the server that it comes from.

const busyWords = () => "computing …";

function beginAsking() {}

async function ask(path, body) {
  const response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (!response.ok) throw new Error(await response.text());
  return response.text();
}
