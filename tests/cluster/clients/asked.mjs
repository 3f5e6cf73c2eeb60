// What each client in JavaScript asks: as `asked.py`.
import { z } from "zod";

const { PRELUDE_URL: url, PRELUDE_MODEL: model, PRELUDE_ADAPTER: adapter, PRELUDE_PROMPT: prompt } = process.env;
export { url, model, adapter, prompt };
export const key = process.env.PRELUDE_KEY ?? "none";
export const maxTokens = 200;
export const weather = z
  .object({ city: z.enum(["Rome", "Oslo"]), celsius: z.boolean(), note: z.string().max(12) })
  .strict();
export const trip = z.object({ there: weather, back: z.enum(["Rome", "Oslo"]).nullable() }).strict();

export async function tell(checks) {
  for (const [check, run] of Object.entries(checks)) {
    let found;
    try {
      found = { value: await run() };
    } catch (error) {
      found = { error: `${error.name}: ${error.message}`, trace: `${error.stack}\n${error.responseBody ?? ""}` };
    }
    console.log(JSON.stringify({ check, ...found }));
  }
}
