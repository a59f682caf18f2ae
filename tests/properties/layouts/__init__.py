"""Promise 1 as covering arrays, each row proved: `make test` covers the levels, `make prove` pairs and triples."""
