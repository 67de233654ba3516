"""The service over HTTP: accounts and their keys, OpenAI's requests and answers, metrics."""
