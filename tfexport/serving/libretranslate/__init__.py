"""The routes of LibreTranslate: text and HTML of any length."""
