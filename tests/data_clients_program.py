"""Packages that make data, as clients of fgserve: data_clients_program.py NAME URL FOLDER asks for the capitals of
COUNTRIES, in JSON of SCHEMA, and prints them as a line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

COUNTRIES = ["France", "Peru", "Japan"] * 4
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string"}},
    "required": ["capital"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
MODEL, QUESTION = "fastgen-tiny", "What is the capital of {}?"


def data_designer(url: str, folder: str) -> list[str]:
    import data_designer.config as dd
    import pandas
    from data_designer.interface import DataDesigner

    fenced = f'start: "```json\\n" answer "\\n```"\nanswer: %json {json.dumps(SCHEMA)}'  # as its parser expects
    parameters = dd.ChatCompletionInferenceParams(
        max_tokens=64, temperature=0.0, max_parallel_requests=8, extra_body={"structured_outputs": {"grammar": fenced}}
    )
    provider = dd.ModelProvider(name="fastgen", endpoint=f"{url}/v1", api_key="none")
    model = dd.ModelConfig(alias="tiny", model=MODEL, provider="fastgen", inference_parameters=parameters)
    builder = dd.DataDesignerConfigBuilder(model_configs=[model])
    builder.with_seed_dataset(dd.DataFrameSeedSource(df=pandas.DataFrame({"country": COUNTRIES})))
    prompt = QUESTION.format("{{ country }}")
    builder.add_column(
        dd.LLMStructuredColumnConfig(name="answer", model_alias="tiny", prompt=prompt, output_format=SCHEMA)
    )
    made = DataDesigner(artifact_path=folder, model_providers=[provider]).create(builder, num_records=len(COUNTRIES))
    return [answer["capital"] for answer in made.load_dataset()["answer"]]


def distilabel(url: str, folder: str) -> list[str]:
    from distilabel.models import OpenAILLM
    from distilabel.pipeline import Pipeline
    from distilabel.steps import LoadDataFromDicts
    from distilabel.steps.tasks import TextGeneration

    options = {"max_new_tokens": 32, "temperature": 0.0, "extra_body": {"response_format": RESPONSE_FORMAT}}
    llm = OpenAILLM(model=MODEL, base_url=f"{url}/v1", api_key="none", generation_kwargs=options)
    with Pipeline(cache_dir=folder) as pipeline:
        rows = [{"instruction": QUESTION.format(country)} for country in COUNTRIES]
        LoadDataFromDicts(data=rows, batch_size=6) >> TextGeneration(llm=llm, input_batch_size=6)
    made = pipeline.run(use_cache=False)["default"]["train"]
    return [json.loads(answer)["capital"] for answer in made["generation"]]


def ray_data(url: str, folder: str) -> list[str]:
    import ray
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": QUESTION.format(row["country"])}]
        options = {"max_tokens": 32, "temperature": 0.0, "response_format": RESPONSE_FORMAT}
        return {"payload": {"model": MODEL, "messages": messages, **options}}

    def read(row: dict[str, Any]) -> dict[str, Any]:
        return {"country": row["country"], **json.loads(row["http_response"]["choices"][0]["message"]["content"])}

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = HttpRequestProcessorConfig(url=f"{url}/v1/chat/completions", batch_size=6, max_retries=5, concurrency=1)
    rows = ray.data.from_items([{"country": country} for country in COUNTRIES])
    made = build_processor(config, preprocess=ask, postprocess=read)(rows).take_all()
    return [row["capital"] for country in COUNTRIES[:3] for row in made if row["country"] == country]


if __name__ == "__main__":
    name, url, folder = sys.argv[1:]
    print(json.dumps(sorted(globals()[name](url, folder))))
