"""A session with a server, as one would type it: start M4 with the real model, and talk to it.

Each statement of SESSION is printed, executed, and followed by its result.
"""

import ast
import re
import urllib.request

from openai import APIStatusError

from milestone_llm.lab.bench.running_server import running_server

SESSION = """
from openai import OpenAI
client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
model
def ask(text, **options):
    message = {"role": "user", "content": text}
    options = {"temperature": 0, "max_tokens": 24, **options}
    return client.chat.completions.create(model=model, messages=[message], **options)
capital = "What is the capital of France?"
answer = ask(capital)
answer.choices[0].message.content, answer.choices[0].finish_reason
[event.choices[0].delta.content for event in ask(capital, stream=True)]
usage = ask(capital).usage
usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
def complete(prompt, **options):
    options = {"temperature": 0, "max_tokens": 20, **options}
    return client.completions.create(model=model, prompt=prompt, **options)
complete("One, two, three,").choices[0].text
complete("One, two, three,", stop=["six"]).choices[0].text
[choice.text for choice in complete(["One, two,", "Monday, Tuesday,"], max_tokens=2).choices]
ask("Hello", top_p=2)
ask("Hello", modalities=["audio"])
stream = complete("Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True})
next(iter(stream)).choices[0].text, metric("num_requests_running")
stream.close()
while metric("num_requests_running"): pass
metric("kv_cache_usage_perc"), metric('request_success_total{finished_reason="abort"}')
"""


def metric(name: str) -> float:
    """Return the value of a metric, by its name without the prefix and the model's label."""
    page = urllib.request.urlopen(url + "/metrics").read().decode()
    page = re.sub(r',?(model_name|engine)="[^"]*"', "", page).replace("{}", "").replace("{,", "{")
    return float(re.search(rf"^milestone_llm:{re.escape(name)} (.*)", page, flags=re.M)[1])


with running_server(["m4_prefix_chunked.serve", "--max-model-len", "512"]) as url:
    for node in ast.parse(SESSION).body:
        lines = ast.get_source_segment(SESSION, node).split("\n")
        print("\n".join([">>> " + lines[0], *("... " + line for line in lines[1:])]))
        try:
            exec(compile(ast.Interactive([node]), "session", "single"))
        except APIStatusError as error:
            print(f"{type(error).__name__}: {error.body['message']}")
