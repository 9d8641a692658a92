"""The addresses of LibreTranslate: text and HTML of any length."""
