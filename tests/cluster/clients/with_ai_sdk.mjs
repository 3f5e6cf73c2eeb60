// Vercel's AI SDK: `ai` with `@ai-sdk/openai-compatible`, and over responses with `@ai-sdk/openai`.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { adapter, key, maxTokens, model, prompt, tell, trip, url, weather } from "./asked.mjs";

const provider = createOpenAICompatible({
  name: "prelude", baseURL: url, apiKey: key, includeUsage: true, supportsStructuredOutputs: true,
});
const responding = createOpenAI({ baseURL: url, apiKey: key })(adapter);
const asked = { model: provider(adapter), prompt, temperature: 0, maxOutputTokens: maxTokens, maxRetries: 0 };
const get_weather = tool({ description: "The weather of a city", inputSchema: weather, execute: () => "Sunny." });
const required = {
  tools: { get_weather },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" }),
};
const call = (steps) => ({ name: steps[0].toolCalls[0].toolName, arguments: steps[0].toolCalls[0].input });

await tell({
  text: async () => (await generateText(asked)).text,
  adapter_field: async () => {
    const providerOptions = { prelude: { adapter } };
    return (await generateText({ ...asked, model: provider(model), providerOptions })).text;
  },
  stream: async () => {
    const pieces = [];
    for await (const piece of streamText({ ...asked, onError: () => {} }).textStream) pieces.push(piece);
    return pieces;
  },
  tools: async () => {
    const { steps, text } = await generateText({ ...asked, ...required });
    return { ...call(steps), after: text };
  },
  tools_stream: async () => call(await streamText({ ...asked, ...required, onError: () => {} }).steps),
  json_schema: async () => (await generateText({ ...asked, output: Output.object({ schema: trip }) })).output,
  json_schema_stream: async () => {
    const answer = streamText({ ...asked, output: Output.object({ schema: trip }), onError: () => {} });
    await answer.consumeStream();
    return await answer.output;
  },
  responses: async () => (await generateText({ ...asked, model: responding })).text,
  responses_tools: async () => {
    const { steps, text } = await generateText({ ...asked, ...required, model: responding });
    return { ...call(steps), after: text };
  },
});
