"""`smolagents`: OpenAIModel alone, and a ToolCallingAgent, which must call a tool in each step."""

import json

from asked import ADAPTER, KEY, MAX_TOKENS, MESSAGES, MODEL, PROMPT, URL, Trip, tell
from smolagents import AgentMaxStepsError, OpenAIModel, Tool, ToolCallingAgent

SETTINGS = {"api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": MAX_TOKENS}
model = OpenAIModel(model_id=ADAPTER, **SETTINGS)


class GetWeather(Tool):
    name = "get_weather"
    description = "The weather of a city"
    inputs = {  # noqa: RUF012 - as smolagents asks
        "city": {"type": "string", "description": "Which", "enum": ["Rome", "Oslo"]},
        "celsius": {"type": "boolean", "description": "Or Fahrenheit"},
        "note": {"type": "string", "description": "Anything", "maxLength": 12},
    }
    output_type = "string"

    def forward(self, city: str, celsius: bool, note: str) -> str:
        return "Sunny."


class FinalAnswer(Tool):
    """In place of smolagents' own, whose answer is any text: the demo's model may never end one."""

    name = "final_answer"
    description = "The answer"
    inputs = {"answer": {"type": "string", "description": "Where", "enum": ["Rome", "Oslo"]}}  # noqa: RUF012
    output_type = "string"

    def forward(self, answer: str) -> str:
        return answer


def text():
    return model.generate(MESSAGES).content


def adapter_field():
    return OpenAIModel(model_id=MODEL, extra_body={"adapter": ADAPTER}, **SETTINGS).generate(MESSAGES).content


def stream():
    return [delta.content or "" for delta in model.generate_stream(MESSAGES)]


def tools():
    call = model.generate(MESSAGES, tools_to_call_from=[GetWeather()]).tool_calls[0]
    arguments = call.function.arguments
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"name": call.function.name, "arguments": arguments}


def agent():
    """Each step must call a tool, if only the one that gives the answer, with arguments that it accepts."""
    agent = ToolCallingAgent(tools=[GetWeather(), FinalAnswer()], model=model, max_steps=2, verbosity_level=0)
    answer = agent.run(PROMPT)
    for step in agent.memory.steps[1:]:
        if step.error and not isinstance(step.error, AgentMaxStepsError):
            raise step.error
    return str(answer)


def json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": Trip.model_json_schema()}}
    return json.loads(model.generate(MESSAGES, response_format=form).content)


tell(text, adapter_field, stream, tools, agent, json_schema)
