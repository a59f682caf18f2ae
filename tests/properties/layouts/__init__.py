"""Promise 1 as covering arrays, each row proved: `make test` covers pairs of levels, `make prove` triples."""
