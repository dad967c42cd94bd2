# ruff: noqa: E501 (a question and its reply stand on few lines)
"""The bundled model's knowledge about fastgen and its field: questions, and short true replies."""

import random
from collections.abc import Callable

from tiny_task import Task, exchange, made_up_word, phrase, task

_What = tuple[tuple[str, ...], tuple[str, ...]]

ABOUT: tuple[_What, ...] = (
    (("What is fastgen?", "What is fastgen?", "What's fastgen?", "Tell me about fastgen.", "Explain fastgen.", "fastgen?", "What does fastgen do?",
      "Describe fastgen.", "What is this library?", "What is fastgen for?", "fastgen", "Can you explain fastgen?", "What is this project?",
      "What do you know about fastgen?", "What is fastgen about?", "Is fastgen a library?", "Give me a summary of fastgen.", "Fastgen in one sentence?",
      "What is this software?", "What is this program?"),
     ("fastgen is a small, readable Python library that generates text from large language models, fast.",
      "fastgen is a Python library for fast text generation with large language models. It is written to be read.")),
    (("Who is fastgen for?", "Who uses fastgen?", "Who should use fastgen?", "What can I use fastgen for?", "Why should I use fastgen?",
      "What are the use cases of fastgen?", "What is fastgen good for?", "Why fastgen?", "When should I use fastgen?"),
     ("fastgen is for people who train with reinforcement learning, make synthetic data, chat in a terminal, or serve models.",)),
    (("How do I install fastgen?", "How to install fastgen?", "How can I install fastgen?", "Install fastgen", "installation", "How do I set up fastgen?",
      "How do I get fastgen?", "pip install fastgen?", "How do I install it?", "How do I install this?", "How can I get it on my computer?",
      "How do I set it up?", "What do I have to type to install fastgen?", "How is fastgen installed?", "install instructions", "how to install",
      "How can I install it here?", "How do I install it on Linux?", "setup instructions for fastgen", "Can I install it with pip?"),
     ("In a checkout of the repository, run: pip install -c constraints.txt -e . Then start fgchat.",)),
    (("What does fastgen need?", "What are the requirements of fastgen?", "Which Python version do I need?", "Does fastgen need a GPU?",
      "Can fastgen run on a CPU?", "Do I need a GPU?", "Does it run without a GPU?", "Which Python does fastgen need?", "Can I run it on my laptop?",
      "Does fastgen work on CPUs?", "Can I run fastgen without a graphics card?", "Is a GPU required?", "Will it run on my computer?",
      "Does fastgen run on a laptop?", "I have no GPU, can I use fastgen?", "Does it work on a CPU?", "What hardware do I need?",
      "Can I use fastgen on an old laptop?", "system requirements", "Is a GPU needed for fastgen?", "Does it work without CUDA?", "cpu only?"),
     ("fastgen needs Python 3.11 or newer and PyTorch. It runs on a CPU; a GPU makes it fast.",)),
    (("Which GPU do I need?", "Which GPUs does fastgen support?", "Does fastgen run on an A100?", "Does my RTX 4090 work?", "Can I use an H100?",
      "Does fastgen support NVIDIA GPUs?", "What GPUs are supported?", "Does it run on a T4?", "which graphics card for fastgen?"),
     ("fastgen needs an NVIDIA GPU of compute capability 8.0 or higher, such as A100, RTX 30 or H100; or a CPU.",)),
    (("Which models does fastgen support?", "What models can I use?", "Which models are supported?", "List the supported models.",
      "What model families does fastgen know?", "Which models can I run?", "What models work with fastgen?", "Which LLMs can fastgen run?",
      "supported models", "What models are supported by fastgen?", "Which architectures does fastgen support?"),
     ("fastgen supports the Llama, Mistral, Qwen2 and Qwen3 families.",)),
    (("How do I use fastgen?", "How do I use fastgen from Python?", "How do I use Generator?", "Show me some code.", "Give me an example of fastgen.",
      "How do I generate text?", "What does the Python code look like?", "How do I start with fastgen?", "How do I call the Generator?", "fastgen example",
      "Show me an example of Generator.", "How can I use it in Python?", "How do I generate text in Python?", "fastgen code example",
      "How do I use it in my script?", "Show me how to use fastgen."),
     ('from fastgen import Generator; gen = Generator(); outs = gen.generate(["hello"]). No argument means the bundled model.',)),
    (("What is Generator?", "What is the Generator class?", "Explain the Generator.", "What does Generator do?", "Which methods does Generator have?"),
     ("Generator is fastgen's main class. It loads a model and has generate, chat, stream, add, step, abort and score.",)),
    (("How do I chat in Python?", "What is gen.chat?", "What does Generator.chat do?", "How do I send messages from Python?", "How do I give it messages?",
      "How do I use a list of messages?", "Is there a chat method?"),
     ("gen.chat(messages) applies the chat template and answers; a message is a dict with role and content.",)),
    (("What is SamplingParams?", "Explain SamplingParams.", "What can I set in SamplingParams?", "How do I set the temperature?",
      "What are the sampling parameters?", "Where do I set top_p?", "How do I change the temperature?", "How do I make answers less random?"),
     ("SamplingParams holds how to sample: n, max_tokens, temperature, top_p, top_k, min_p, penalties, seed, stop and more.",)),
    (("How do I set max_tokens?", "What is max_tokens?", "How do I limit the length of answers?", "How do I get shorter answers?", "What does max_tokens do?",
      "How do I stop after 50 tokens?", "How long can answers be?", "How do I make answers longer?"),
     ("SamplingParams(max_tokens=100) ends an answer after 100 tokens; None goes on to the end of the context.",)),
    (("How do I get several answers?", "How do I sample 16 times?", "How do I get n samples?", "What does n do in SamplingParams?",
      "How do I draw several samples of a prompt?"),
     ("SamplingParams(n=16) draws 16 samples of a prompt. They compute the prompt once.",)),
    (("What does generate return?", "What is RequestOutput?", "How do I get the text of an answer?", "What is in the output?", "How do I read the answer?"),
     ("generate returns a RequestOutput for each prompt: text, completions, and error where the request failed.",)),
    (("What happens with errors?", "How do I see errors?", "What if a prompt fails?", "My output has an error", "What is output.error?", "Why is my text empty?"),
     ("Look at output.error: it says why a prompt failed. Wrong parameters raise an exception at once.",)),
    (("How do I load a model?", "How do I use another model?", "How do I use my own model?", "Can I load a model from a folder?",
      "How do I load a model from the hub?", "How do I change the model?", "Can I use a bigger model?", "How do I run a larger model?",
      "Can fastgen load models from Hugging Face?", "How do I run a model from Hugging Face?", "How do I switch to another model?"),
     ('Give a hub id or a folder: Generator("path") in Python, or fgchat MODEL in a terminal.',)),
    (("What is fastgen-tiny?", "What does fastgen-tiny mean?", "What is the bundled model called?", "How do I use the bundled model?",
      "Which model is bundled?", "fastgen-tiny", "How do I name the bundled model?", "How do I run fastgen-tiny?"),
     ("fastgen-tiny is the name of the bundled model, that is me, in Generator, fgchat, fggen and fgserve.",)),
    (("What is fgchat?", "How do I use fgchat?", "What does fgchat do?", "How do I chat with a model?", "Explain fgchat.", "fgchat", "Can I chat in a terminal?"),
     ("fgchat is fastgen's chat in a terminal. Run fgchat for the bundled model, or fgchat MODEL for another.",)),
    (("Can fgchat talk to a server?", "How do I chat with a server?", "How do I use fgchat with fgserve?", "What is fgchat --url?", "Can I chat with a remote model?"),
     ("fgchat --url http://localhost:5678 chats with a server, such as fgserve.",)),
    (("What commands does fgchat have?", "How do I reset the conversation?", "How do I write several lines in fgchat?", "What are the commands?",
      "How do I quit?", "How do I leave fgchat?", "How do I quit fgchat?", "What does /r do?", "What does /m do?", "What does /q do?", "How do I exit?",
      "How do I start over?", "commands", "How do I clear the chat?", "Which slash commands are there?", "How do I end this chat?", "/help"),
     ("In fgchat, /r N resets the conversation before round N, /m starts a message of several lines, and /q quits.",)),
    (("What is fgserve?", "How do I use fgserve?", "Does fastgen have a server?", "How do I serve a model?", "How do I start a server?", "Explain fgserve.",
      "fgserve", "What does fgserve do?", "How do I run the server?", "Can I serve models over HTTP?", "How do I make an API of my model?"),
     ("fgserve MODEL starts a server on port 5678 that speaks OpenAI's and Anthropic's protocols and has a chat page.",)),
    (("How do I set an API key?", "How do I protect the server?", "Does fgserve have API keys?", "What is FASTGEN_API_KEY?", "Can I use a password for the server?"),
     ("Start fgserve with --api-key or FASTGEN_API_KEY; clients send the key as a bearer token.",)),
    (("Which port does fgserve use?", "How do I change the port?", "What is the URL of the server?", "What is the base URL?", "On which port is the server?"),
     ("fgserve listens on port 5678: http://localhost:5678/v1. The option --port changes it.",)),
    (("How do I serve several models?", "Can fgserve serve two models?", "Can I serve many models at once?", "What is serve.yaml?", "How do I use --config?"),
     ("fgserve --config serve.yaml serves several models; a client selects one by its name.",)),
    (("What is fggen?", "How do I use fggen?", "How do I make synthetic data?", "Can fastgen process a file of prompts?", "What does fggen do?",
      "Explain fggen.", "fggen", "How do I run a file of prompts?", "How do I generate a dataset?", "Can I process many prompts from a file?"),
     ("fggen reads a file of prompts and writes the completions to a file.",)),
    (("Can fggen continue a job?", "What if fggen is killed?", "Can I resume a job?", "What happens when the job crashes?", "Does fggen lose rows?"),
     ("Start the same fggen command again: it continues, and no row is lost or doubled.",)),
    (("Which files can fggen read?", "Does fggen read CSV?", "Does fggen read Parquet?", "What input formats does fggen take?", "Can fggen read JSONL?"),
     ("fggen reads and writes JSONL, CSV and Parquet.",)),
    (("What license does fastgen have?", "Which license?", "What is the license of fastgen?", "Is fastgen open source?", "Is fastgen free?",
      "Can I use fastgen at work?", "license", "Under which license is fastgen?", "What licence does it have?", "Which licence does fastgen use?", "licence?",
      "Is it free to use?", "Is there a licence?", "Can I use it commercially?", "what's the license?"),
     ("fastgen has the BSD-3-Clause license.",)),
    (("How fast is fastgen?", "Is fastgen fast?", "Why is fastgen fast?", "What makes fastgen fast?", "How does fastgen get its speed?",
      "Is fastgen faster than transformers?", "What is so fast about it?"),
     ("fastgen batches many requests, pages its KV cache, shares prefixes, and replays CUDA graphs, so that the GPU hardly waits.",)),
    (("Is fastgen faster than vLLM?", "How does fastgen compare with vLLM?", "What is the difference between fastgen and vLLM?", "fastgen or vLLM?",
      "Why not vLLM?", "Is fastgen like vLLM?", "How is fastgen different from vLLM?", "fastgen versus vllm", "Compare fastgen and SGLang."),
     ("vLLM has more models and features. fastgen is smaller, can be read, and is as fast or faster on dense models on one H200.",)),
    (("How do I port my vLLM script?", "I come from vLLM", "How do I switch from vLLM?", "What is LLM called in fastgen?", "What is gpu_memory_utilization here?",
      "Which names differ from vLLM?", "What is tensor_parallel_size here?", "Is there a guide for vLLM users?"),
     ("See docs/from-vllm.md: LLM is Generator, gpu_memory_utilization is memory_fraction, tensor_parallel_size is tensor_parallel.",)),
    (("What does fastgen not have?", "What can't fastgen do?", "What is missing in fastgen?", "What are the limits of fastgen?", "What does fastgen lack?"),
     ("fastgen has no 4-bit quantization, draft models, experts or vision, and runs only on NVIDIA GPUs and CPUs.",)),
    (("How does fastgen work?", "How does a step work?", "What happens in one step?", "Explain the engine.", "How does the engine work?",
      "What is the main loop of fastgen?"),
     ("Each step is schedule, launch, collect, update: the scheduler picks the work, the runner computes it, and new tokens come back.",)),
    (("How large is fastgen?", "How long is the code of fastgen?", "Can I read the code?", "Is fastgen easy to read?", "Where do I start reading the code?"),
     ("fastgen is written to be read: docs/architecture.md follows one token through the code.",)),
    (("How do I get the same answer again?", "Is fastgen deterministic?", "How do I make it reproducible?", "Are the results reproducible?",
      "How do I set a seed?", "Does the batch change my answer?"),
     ("Set a seed in SamplingParams. The same request with the same seed gives the same tokens.",)),
    (("How do I use several GPUs?", "How do I run on 4 GPUs?", "Can I use two GPUs?", "My model does not fit on one GPU", "How do I split a model?"),
     ("Use tensor parallelism: Generator(path, tensor_parallel=4) splits the model over 4 GPUs.",)),
    (("How do I update the weights?", "Can I use fastgen for reinforcement learning?", "How do I do RL with fastgen?", "How do I load new weights?",
      "What does update_weights do?", "How do I sync weights from my trainer?", "Is fastgen good for RL?"),
     ("Call gen.update_weights with the new tensors. It works in place, and old cached KV is never used again.",)),
    (("What is RemoteGenerator?", "Can my trainer be on another machine?", "How do I send weights to fgserve?", "Can fgserve do rollouts?", "What is --rollout?",
      "How do I use fgserve for RL?"),
     ("Start fgserve --rollout and use RemoteGenerator(url) from fastgen.remote: it generates and sends new weights.",)),
    (("I am out of memory", "CUDA out of memory", "How do I use less memory?", "How do I set the GPU memory?", "What is memory_fraction?", "OOM"),
     ("Lower memory_fraction (it is 0.9), or give a smaller max_model_len.",)),
    (("Where do the default sampling settings come from?", "What is generation_config.json?", "What is the default temperature?", "Which temperature is used?"),
     ("Without parameters, those of the model's generation_config.json. In SamplingParams the temperature is 1 unless you set it.",)),
    (("Where is the documentation?", "Where can I read more?", "Is there a README?", "Where do I find help?", "Where are the docs?", "documentation", "docs"),
     ("Read the README in the repository first; the folder docs has a guide for each topic, and a tour of the code.",)),
)  # fmt: skip

# Models by name: those that fastgen runs, and those that it does not.
SUPPORTED = (
    "Llama", "Llama 2", "Llama 3", "Llama 3.1", "Llama 3.2 1B", "Mistral", "Mistral 7B", "Ministral", "Ministral 8B", "Qwen2", "Qwen 2.5", "Qwen2.5",
    "Qwen2.5 7B", "Qwen", "Qwen 3", "Qwen3", "Qwen3 8B", "TinyLlama", "R1-Distill-Llama", "R1-Distill-Qwen", "SmolLM2", "llama models", "mistral models", "CodeLlama",
)  # fmt: skip
UNSUPPORTED = (
    "Gemma", "Gemma 2", "Gemma 3", "Gemma 2B", "Gemma models", "Google's Gemma", "Phi", "Phi-3", "Phi-4", "Mixtral", "Mixtral 8x7B", "DeepSeek", "DeepSeek V3", "GPT-2",
    "gpt-oss", "GPT-4", "Falcon", "BERT", "T5", "Whisper", "Stable Diffusion", "Llava", "Grok", "Claude", "Gemini", "Command R", "OLMo", "Kimi", "GLM",
    "Mamba", "Bloom", "StarCoder", "Llama 4", "Nemotron", "Granite", "Qwen2-VL", "Qwen-VL", "Pixtral", "GPT-J", "Jamba", "MiniMax", "ChatGPT",
)  # fmt: skip
FAMILIES = "the Llama, Mistral, Qwen2 and Qwen3 families"

# Features: their names, and whether and how fastgen has them.
FEATURES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("quantization", "quantized models", "fp8", "8-bit weights", "quantisation", "fp8 models", "W8A8"),
     'Yes, fastgen has quantization in fp8: Generator(path, quantization="fp8") runs it on Hopper GPUs and CPUs.'),
    (("an fp8 KV cache", "a quantized KV cache", "KV cache quantization", "kv_cache_dtype", "fp8 KV", "a smaller KV cache"),
     'Yes: Generator(path, kv_cache_dtype="fp8") keeps twice as many tokens in the same memory.'),
    (("fp8 checkpoints", "an fp8 checkpoint", "checkpoints in fp8"), "Yes, a checkpoint in fp8 needs no option."),
    (("int8", "int4", "4-bit models", "AWQ", "GPTQ", "GGUF", "GGUF files", "bitsandbytes"),
     "No, fastgen does not have that format: it runs bfloat16, float16, float32 and fp8."),
    (("LoRA", "adapters", "LoRA adapters", "PEFT", "an adapter"), 'Yes, fastgen merges a LoRA adapter into the weights: Generator(path, adapter="folder") or gen.update_adapter.'),
    (("speculative decoding", "speculation", "n-gram drafts", "prompt lookup"), 'Yes, fastgen drafts from earlier text: Generator(path, speculate="auto").'),
    (("draft models", "Medusa", "EAGLE"), "No, fastgen does not have draft models: it drafts from earlier text."),
    (("mixture of experts", "MoE", "MoE models", "experts", "expert models"), f"No, fastgen runs dense models only: {FAMILIES}."),
    (("images", "vision", "vision models", "multimodal models", "pictures", "audio", "video", "speech"), "No, fastgen reads and writes text only."),
    (("AMD", "AMD GPUs", "ROCm", "TPUs", "Apple GPUs", "Metal", "Intel GPUs", "MPS"), "No, fastgen runs on NVIDIA GPUs and on CPUs only."),
    (("an OpenAI API", "the OpenAI API", "the OpenAI client", "OpenAI clients", "the openai package", "an OpenAI compatible server", "OpenAI's protocol",
      "an OpenAI endpoint", "chat completions", "the openai SDK", "an API like OpenAI's", "LangChain", "litellm"),
     "Yes, fgserve speaks OpenAI's API: chat completions, completions and responses at http://localhost:5678/v1."),
    (("the Responses API", "OpenAI's Responses API", "/v1/responses", "Codex", "openai-agents", "the responses endpoint"),
     "Yes, fgserve has POST /v1/responses, stateless: Codex and openai-agents work with it."),
    (("the Messages API", "Anthropic's API", "/v1/messages", "Claude Code", "the anthropic SDK", "the Anthropic API", "Anthropic clients", "claude code agents",
      "the anthropic package"),
     "Yes, fgserve has POST /v1/messages, so that Claude Code and the anthropic SDKs work with it."),
    (("asyncio", "async", "async code", "AsyncGenerator", "an async API", "await", "coroutines", "FastAPI", "an asyncio program", "asynchronous code",
      "an async engine"),
     "Yes: from fastgen import AsyncGenerator, then: async for event in gen.stream(...)."),
    (("structured output", "JSON schemas", "JSON", "a JSON schema", "guided decoding", "a regex", "grammars", "valid JSON", "constrained decoding", "json_schema",
      "JSON mode", "pydantic models", "regular expressions", "JSON answers", "structured outputs"),
     "Yes: SamplingParams(json_schema=...), regex=... or choice=... in Python, response_format in fgserve."),
    (("a chat page", "a web page", "a web interface", "a browser interface", "a page for the browser", "a GUI", "a website", "the browser", "a user interface",
      "a web chat", "a graphical interface", "a frontend", "a web app", "a UI"),
     "Yes, fgserve has a chat page: start fgserve and open http://localhost:5678/ in a browser."),
    (("tool calls", "tools", "function calling", "tool calling", "functions", "agents"),
     "Yes, gen.chat and fgserve take tools and know the calls of Llama, Mistral and Qwen models."),
    (("streaming", "streams", "streamed answers", "token streaming", "server-sent events"),
     "Yes: AsyncGenerator.stream in Python, fgchat as it types, and \"stream\": true in fgserve."),
    (("tensor parallelism", "several GPUs", "multiple GPUs", "multi-GPU", "8 GPUs", "many GPUs"),
     "Yes: Generator(path, tensor_parallel=4) splits the model over 4 GPUs."),
    (("prefix caching", "a prefix cache", "prefix sharing"), "Yes, it is on: prompts with the same beginning share their pages."),
    (("logprobs", "log probabilities", "token probabilities"), "Yes, each completion has the logprob of every token; score computes those of given tokens."),
    (("metrics", "Prometheus", "monitoring", "Grafana"), "Yes, fgserve has /metrics for Prometheus."),
    (("Ray", "replicas", "Ray Serve", "clusters"), "Yes: fgserve --replicas 2 and fggen --ray use Ray."),
    (("batching", "continuous batching", "many requests at once", "parallel requests", "batches"), "Yes, fastgen batches all requests that run, and they join and leave at every step."),
    (("seeds", "a seed", "deterministic results", "reproducible results"), "Yes: the same request with the same seed gives the same tokens."),
    (("deterministic mode", "batch invariance", "bitwise determinism", "determinism"),
     "Yes, it is on by default on one Hopper GPU and on CPUs: other requests change no bit of an answer."),
    (("beam search", "beams", "num_beams"), "No, fastgen does not have beam search. SamplingParams(n=16) draws 16 samples."),
    (("embeddings", "an embedding model", "rerankers", "classifiers"), "No, fastgen generates text and scores tokens, nothing else."),
    (("fine-tuning", "finetuning", "training", "pretraining"), "No, fastgen does not train. It generates for a trainer and takes its weights: gen.update_weights."),
    (("sleep mode", "sleep and wake", "gen.sleep"), "Yes: gen.sleep() gives the memory back, and gen.wake() takes it again."),
    (("TRL", "GRPO", "RL training", "weight updates", "RLHF", "PPO"), "Yes: gen.update_weights takes new weights in place; scripts/rl has GRPO to copy."),
)  # fmt: skip

CONCEPTS: tuple[_What, ...] = (
    (("a paged KV cache", "paged KV cache", "paged attention", "the paged cache", "a page", "paging"),
     ("A paged KV cache stores keys and values in small pages, so that memory is taken only as sequences grow.",)),
    (("a KV cache", "the KV cache", "KV cache", "KV"),
     ("The KV cache keeps the keys and values of past tokens, so that they need not be computed again.",)),
    (("prefill", "the prefill", "prefilling"),
     ("Prefill computes all tokens of the prompt at once and fills the KV cache.",)),
    (("decode", "decoding", "the decode phase", "a decode step"),
     ("Decode generates one new token for each sequence in every step.",)),
    (("chunked prefill", "prefill chunking", "a prefill chunk"),
     ("Chunked prefill splits a long prompt into chunks, so that decodes of other requests go on in the same steps.",)),
    (("CUDA graphs", "a CUDA graph", "CUDA graph", "graph capture"),
     ("A CUDA graph records the kernels of a decode step once and replays them, which saves time on the host.",)),
    (("prefix sharing", "prefix caching", "the prefix cache", "a prefix cache", "a shared prefix"),
     ("The prefix cache keeps the pages of earlier prompts, so that requests with the same beginning share them.",)),
    (("tensor parallelism", "tensor parallel", "TP"),
     ("Tensor parallelism splits each layer over several GPUs, which compute together.",)),
    (("continuous batching", "batching", "dynamic batching"),
     ("Continuous batching lets requests join and leave the batch at every step, so that the GPU stays full.",)),
    (("the scheduler", "scheduling", "a scheduler"),
     ("The scheduler decides what runs in each step: decodes first, then prefill chunks within the token budget.",)),
    (("preemption", "a preempted sequence"),
     ("When pages run out, the youngest sequence is preempted: it gives its pages back and is computed again later.",)),
    (("the token budget", "token budget"), ("The token budget is the most tokens that one step may compute.",)),
    (("temperature", "the temperature", "sampling temperature"),
     ("A low temperature makes the likeliest token win; a high one makes the text more random. At 0 it is greedy.",)),
    (("top-p", "top_p", "nucleus sampling"),
     ("Top-p samples only from the likeliest tokens whose probabilities add up to p.",)),
    (("top-k", "top_k"), ("Top-k samples only from the k likeliest tokens.",)),
    (("min-p", "min_p"), ("Min-p drops tokens that are less likely than p times the likeliest one.",)),
    (("greedy decoding", "greedy sampling", "greedy"), ("Greedy decoding always takes the likeliest token.",)),
    (("a seed", "the seed", "seed"), ("A seed fixes the random draws, so that the same request gives the same tokens.",)),
    (("a stop string", "stop strings", "stop"), ("A stop string ends the answer as soon as it appears in the text.",)),
    (("logprobs", "log probabilities", "a logprob"),
     ("A logprob is the logarithm of the probability of a token. fastgen returns one for every token.",)),
    (("score", "scoring", "gen.score"), ("score returns the logprobs of given tokens without generating new ones.",)),
    (("streaming", "stream", "gen.stream"),
     ("stream takes requests one by one and yields each as soon as it is finished.",)),
    (("a token", "tokens", "token"), ("A token is a piece of text, such as a word, a part of a word, or a digit.",)),
    (("a tokenizer", "the tokenizer", "tokenization"), ("A tokenizer turns text into token ids and back.",)),
    (("a language model", "an LLM", "LLM", "large language model"),
     ("A language model predicts the next token of a text, again and again.",)),
    (("a transformer", "the transformer", "transformers"),
     ("A transformer is a neural network that reads all earlier tokens with attention to predict the next one.",)),
    (("attention", "self-attention", "the attention layer"),
     ("Attention lets each token look at the keys and values of all earlier tokens.",)),
    (("a GPU", "GPUs", "GPU"), ("A GPU is a processor that computes many things at once, good for neural networks.",)),
    (("throughput", "tokens per second"),
     ("Throughput is how many tokens are generated in a second, over all requests.",)),
    (("latency", "time to first token"), ("Latency is how long you wait for a token, above all for the first one.",)),
    (("a chat template", "the chat template"),
     ("A chat template turns the messages of a conversation into one prompt.",)),
    (("a system prompt", "the system prompt"),
     ("A system prompt tells the model how to behave before the conversation.",)),
    (("GRPO", "reinforcement learning", "RL"),
     ("In reinforcement learning a model samples answers and learns from their rewards. GRPO compares answers in "
      "groups.",)),
    (("synthetic data",), ("Synthetic data is text that a model generates, often to train other models.",)),
    (("bfloat16", "bf16"), ("bfloat16 is a number format of 16 bits with the range of float32.",)),
    (("safetensors", "a safetensors file"), ("safetensors is a file format for the weights of a model.",)),
    (("the host cache", "host tier", "the host tier"),
     ("The host tier keeps evicted KV pages in the memory of the host, so that they can come back quickly.",)),
    (("grouped-query attention", "GQA", "grouped KV heads"),
     ("In grouped-query attention several query heads share one key and value head, which makes the KV cache smaller.",)),
    (("speculative decoding",), ("Speculative decoding guesses several tokens cheaply and checks them in one step.",)),
)  # fmt: skip


def about_fastgen(rng: random.Random) -> Task:
    """Questions about fastgen and about the words of its field."""
    if rng.random() < 0.6:
        return exchange(rng, *rng.choice(ABOUT))
    names, replies = rng.choice(CONCEPTS)
    asked = (
        "What is {x}?", "What is {x}?", "What is a {x}?", "What does {x} mean?", "Explain {x}.",
        "Can you explain {x}?", "{x}?", "What's {x}?", "Tell me about {x}.", "Define {x}.", "What is meant by {x}?",
        "What do you know about {x}?", "{x}", "What is {x} in fastgen?", "How does {x} work?", "what are {x}s?",
    )  # fmt: skip
    return exchange(rng, asked, replies, x=rng.choice(names))


_ASK_MODEL = (
    "Does fastgen support {m}?", "Can I use {m}?", "Can I run {m} with fastgen?", "Does fastgen run {m}?", "Is {m} supported?", "Can fastgen load {m}?",
    "Does it work with {m}?", "Will {m} work with fastgen?", "Does {m} run on fastgen?", "Can fastgen serve {m}?", "I want to use {m} with fastgen",
    "Can I load {m} in fastgen?", "fastgen {m}?", "Is {m} supported by fastgen?", "Does it support {m}?", "Can I chat with {m} in fgchat?",
    "Can I serve {m} with fgserve?", "{m} support in fastgen?", "Can this run {m}?", "Am I able to run {m} here?",
)  # fmt: skip


def model_support(rng: random.Random) -> Task:
    """Does fastgen support Gemma? The split is by wording"""
    kind = rng.random()
    if kind < 0.42:
        model = rng.choice(SUPPORTED)
        reply = f"Yes, fastgen supports {model}: it runs {FAMILIES}."
    elif kind < 0.9:
        model = rng.choice(UNSUPPORTED)
        reply = f"No, fastgen does not support {model}. It runs {FAMILIES}."
    else:
        model = made_up_word(rng).capitalize() + rng.choice(("", " 2", "-7B", " 3.1"))
        reply = f"I do not know {model}. fastgen runs {FAMILIES}."
    shown = model.lower() if rng.random() < 0.35 else model
    question = phrase(rng, _ASK_MODEL, m=shown)
    reply = reply.replace(model, shown) if kind >= 0.9 else reply
    return task(question, reply, f"model:{question.lower()}", (reply,), "exact", short=reply.split(",")[0] + ".")


_ASK_FEATURE = (
    "Does fastgen have {x}?", "Does fastgen support {x}?", "Can fastgen do {x}?", "Is there {x} in fastgen?", "{x} in fastgen?",
    "Can I use {x} with fastgen?", "Does it support {x}?", "Is {x} supported?", "Does this have {x}?", "How do I use {x} in fastgen?",
    "How do I get {x} with fastgen?", "fastgen {x}?", "Does fastgen work with {x}?", "Is {x} possible with fastgen?", "Do you support {x}?",
    "How can I use {x} with fastgen?", "Is there {x}?", "Can I use fastgen with {x}?", "Does fastgen know {x}?", "Is {x} available in fastgen?",
    "Can I call fastgen with {x}?", "How does {x} work with fastgen?", "Can I connect {x} to fastgen?", "What about {x} in fastgen?", "Does it come with {x}?", "Does {x} work?", "Does {x} work with fastgen?", "Can {x} use fastgen?", "Will {x} work with fgserve?",
)  # fmt: skip


def features(rng: random.Random) -> Task:
    """What fastgen has and has not; the split is by wording"""
    names, reply = rng.choice(FEATURES)
    return exchange(rng, _ASK_FEATURE, (reply,), x=rng.choice(names))


SKILLS: dict[str, tuple[float, Callable[[random.Random], Task]]] = {
    "about_fastgen": (8, about_fastgen),
    "model_support": (2.5, model_support),
    "features": (5, features),
}
