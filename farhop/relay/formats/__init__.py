"""What bodies and answers say: OpenAI, KServe, rankings, forms. Bytes in, values out; never opens anything."""
