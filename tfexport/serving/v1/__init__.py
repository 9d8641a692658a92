"""The routes below `/v1`: translate, score and classify, with every option."""
