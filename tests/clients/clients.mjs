// Clients for Node, each in its own way. usage: node clients.mjs URL MODEL
import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { tool as langchainTool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { generateText, Output, streamText, tool } from "ai";
import { createAgent } from "langchain";
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

async function langchain(useResponsesApi) {
  const asked = { model, maxTokens: 200, temperature: 0, maxRetries: 0, useResponsesApi };
  const configuration = { baseURL: settings.baseURL };
  const open = (fields) =>
    new ChatOpenAI({ ...asked, apiKey: settings.apiKey, configuration, ...fields });
  const chat = open({});
  const called = [];
  const about = { name: "weather", description: "The weather.", schema: City };
  const weather = langchainTool((given) => {
    called.push(City.parse(given));
    return "sun";
  }, about);
  const whole = (await chat.invoke("Who?")).text;
  assert.ok(whole.length);
  let text = "";
  for await (const part of await chat.stream("Who?")) text += part.text;
  assert.equal(text, whole);
  await chat.bindTools([weather]).invoke("Who?");
  const forced = chat.bindTools([weather], { tool_choice: "weather" });
  const [call] = (await forced.invoke("Who?")).tool_calls;
  assert.equal(await weather.invoke(call.args), "sun");
  let streamed;
  for await (const part of await forced.stream("Who?")) streamed = streamed?.concat(part) ?? part;
  City.parse(streamed.tool_calls[0].args);
  for (const method of ["jsonSchema", "functionCalling"])
    Person.parse(await chat.withStructuredOutput(Person, { method }).invoke("Who?"));
  const agent = createAgent({ model: chat, tools: [weather] });
  const { messages: said } = await agent.invoke({ messages });
  assert.equal(said.at(-1).type, "ai");
  assert.ok(called.length);
  await assert.rejects(open({ temperature: -1 }).invoke("Who?"), { status: 400 });
}

await openaiNode();
console.log("openai");
await langchain(false);
await langchain(true);
console.log("langchain");
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
