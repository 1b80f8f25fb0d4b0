"""Items inside other grammars: JSON schemas, structural tags and EBNF of xgrammar's, with item sets as holes."""
