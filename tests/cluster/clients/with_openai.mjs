// `openai` for Node: chats, its helpers for zod, and responses.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { adapter, key, maxTokens, model, prompt, tell, trip, url, weather } from "./asked.mjs";

const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const asked = { model: adapter, messages: [{ role: "user", content: prompt }], max_tokens: maxTokens, temperature: 0 };
const answer = async (more) => (await client.chat.completions.create({ ...asked, ...more })).choices[0].message;
const parameters = z.toJSONSchema(weather);
const tools = [{ type: "function", function: { name: "get_weather", strict: true, parameters } }];
const response = { model: adapter, input: prompt, temperature: 0, max_output_tokens: maxTokens };

await tell({
  text: async () => (await answer()).content,
  adapter_field: async () => (await answer({ model, adapter })).content,
  stream: async () => {
    const pieces = [];
    const chunks = await client.chat.completions.create({ ...asked, stream: true });
    for await (const chunk of chunks) pieces.push(chunk.choices[0]?.delta.content ?? "");
    return pieces;
  },
  tools: async () => {
    const message = await answer({ tools, tool_choice: "required" });
    const [{ id, function: called }] = message.tool_calls;
    const result = { role: "tool", tool_call_id: id, content: "Sunny." };
    const after = (await answer({ tools, messages: [...asked.messages, message, result] })).content;
    return { name: called.name, arguments: JSON.parse(called.arguments), after };
  },
  tools_stream: async () => {
    const stream = client.chat.completions.stream({ ...asked, tools, tool_choice: "required" });
    const called = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0].function;
    return { name: called.name, arguments: JSON.parse(called.arguments) };
  },
  json_schema: async () => {
    const response_format = zodResponseFormat(trip, "trip");
    return (await client.chat.completions.parse({ ...asked, response_format })).choices[0].message.parsed;
  },
  responses: async () => (await client.responses.create(response)).output_text,
  responses_stream: async () => {
    const pieces = [];
    for await (const event of await client.responses.create({ ...response, stream: true }))
      if (event.type === "response.output_text.delta") pieces.push(event.delta);
    return pieces;
  },
});
