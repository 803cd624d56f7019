// Clients for Node, each in its own way. usage: node clients.mjs URL MODEL
import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const Person = z.object({ name: z.string().max(9), job: z.enum(["cook", "pilot"]) });
const City = z.object({ city: z.enum(["Rome", "Oslo"]) });
const messages = [{ role: "user", content: "Who?" }];

async function openaiNode() {
  const client = new OpenAI({ ...settings, maxRetries: 0 });
  const parameters = z.toJSONSchema(City);
  const weather = { name: "weather", description: "The weather.", parameters };
  const asked = { model, messages, max_tokens: 40, temperature: 0 };
  const chats = client.chat.completions;
  const whole = await chats.create({ ...asked, tools: [{ type: "function", function: weather }] });
  let text = "";
  for await (const event of await chats.create({ ...asked, stream: true }))
    text += event.choices[0].delta.content ?? "";
  assert.equal(text, (await chats.create(asked)).choices[0].message.content);
  assert.ok(whole.choices[0].finish_reason);
  const parsed = await chats.parse({
    ...asked,
    max_tokens: 200,
    response_format: zodResponseFormat(Person, "person"),
  });
  Person.parse(parsed.choices[0].message.parsed);
  const called = [];
  const run = chats.runTools({
    ...asked,
    tool_choice: "required",
    max_tokens: 200,
    tools: [
      {
        type: "function",
        function: {
          ...weather,
          parse: JSON.parse,
          function: (given) => {
            called.push(City.parse(given));
            return "sun";
          },
        },
      },
    ],
  }, { maxChatCompletions: 2 });
  await run.done();
  assert.ok(called.length);
  const response = await client.responses.parse({
    model,
    input: "Who?",
    text: { format: zodTextFormat(Person, "person") },
  });
  Person.parse(response.output_parsed);
  await assert.rejects(chats.create({ ...asked, model: "other" }), OpenAI.NotFoundError);
}

async function aiSdk(kind, of) {
  const asked = { model: of, maxOutputTokens: 200, temperature: 0, maxRetries: 0, prompt: "Who?" };
  const called = [];
  const weather = tool({
    description: "The weather.",
    inputSchema: City,
    execute: async (given) => {
      called.push(given);
      return "sun";
    },
  });
  const whole = (await generateText(asked)).text;
  assert.ok(whole.length);
  let text = "";
  for await (const part of streamText(asked).textStream) text += part;
  assert.equal(text, whole);
  const { output } = await generateText({ ...asked, output: Output.object({ schema: Person }) });
  Person.parse(output);
  await generateText({ ...asked, tools: { weather } });
  const forced = await generateText({ ...asked, tools: { weather }, toolChoice: "required" });
  assert.equal(forced.toolCalls[0].toolName, "weather");
  const stream = streamText({ ...asked, tools: { weather }, toolChoice: "required" });
  assert.equal((await stream.toolCalls)[0].toolName, "weather");
  assert.ok(called.length >= 2, kind);
}

await openaiNode();
console.log("openai");
const provider = createOpenAI(settings);
await aiSdk("responses", provider(model));
console.log("ai, responses");
await aiSdk("chat", provider.chat(model));
console.log("ai, chat");
const compatible = createOpenAICompatible({
  name: "milestone",
  supportsStructuredOutputs: true,
  ...settings,
});
await aiSdk("compatible", compatible(model));
console.log("ai, compatible");
