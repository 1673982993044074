//! Chat templates: messages to the text that a model was trained to see.
//!
//! Templates are Jinja, written for Python's jinja2 as transformers sets it up: blocks trimmed, Python's string
//! methods, `raise_exception`, and a `tojson` that writes as `json.dumps` does. They see `messages`,
//! `add_generation_prompt`, `bos_token` and `eos_token`; tools and documents are not offered. `strftime_now` is left
//! undefined, so that the same messages give the same text every day: templates fall back to the date they carry.

use std::io;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};

use super::TokenizerError;

/// Steps after which a template is stopped: some seconds, thousands of times what a long conversation takes.
const MAX_FUEL: u64 = 100_000_000;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl ChatMessage {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A model's chat template with the tokens that it may name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTemplate {
    source: String,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

/// What is read of `tokenizer_config.json`.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    chat_template: Option<TemplateField>,
    bos_token: Option<TokenField>,
    eos_token: Option<TokenField>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TemplateField {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenField {
    Text(String),
    Object { content: String },
}

impl TokenField {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object { content: text } => text,
        }
    }
}

impl ChatTemplate {
    /// The template with source text `source`; the tokens are those that it may name.
    pub fn new(source: impl Into<String>, bos_token: Option<String>, eos_token: Option<String>) -> Self {
        Self { source: source.into(), bos_token, eos_token }
    }

    pub(super) fn from_hf_dir(directory: &Path) -> Result<Option<Self>, TokenizerError> {
        let read = |name: &str| {
            let path = directory.join(name);
            if !path.is_file() {
                return Ok(None);
            }
            match std::fs::read_to_string(&path) {
                Ok(text) => Ok(Some((path, text))),
                Err(source) => Err(TokenizerError::Io { path, source }),
            }
        };
        let config = match read("tokenizer_config.json")? {
            None => TokenizerConfig::default(),
            Some((path, text)) => {
                serde_json::from_str(&text).map_err(|source| TokenizerError::Json { path, source })?
            }
        };
        let inline = match config.chat_template {
            None => None,
            Some(TemplateField::One(source)) => Some(source),
            Some(TemplateField::Named(templates)) => {
                templates.into_iter().find(|named| named.name == "default").map(|named| named.template)
            }
        };
        // A file of its own takes precedence, as in transformers.
        let source = match read("chat_template.jinja")? {
            Some((_, source)) => Some(source),
            None => inline,
        };
        let bos_token = config.bos_token.map(TokenField::into_text);
        let eos_token = config.eos_token.map(TokenField::into_text);
        Ok(source.map(|source| Self { source, bos_token, eos_token }))
    }

    /// The template's own text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of `messages`; with `add_generation_prompt` it ends where the model's answer begins.
    ///
    /// # Errors
    /// [`TokenizerError::Template`] when the template does not compile, names what is not offered, or raises.
    pub fn render(&self, messages: &[ChatMessage], add_generation_prompt: bool) -> Result<String, TokenizerError> {
        let template = |source| TokenizerError::Template { source };
        let mut environment = Environment::new();
        environment
            .set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(template)?);
        environment.set_fuel(Some(MAX_FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        let compiled = environment.template_from_str(&self.source).map_err(template)?;
        compiled
            .render(context! {
                messages => Serde(messages),
                add_generation_prompt,
                bos_token => self.bos_token.as_deref().unwrap_or_default(),
                eos_token => self.eos_token.as_deref().unwrap_or_default(),
            })
            .map_err(template)
    }
}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it.
fn to_json(value: Value) -> Result<Value, minijinja::Error> {
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, PythonFormatter);
    let written = value.serialize(&mut serializer).map_err(|error| error.to_string());
    let text = written.and_then(|()| String::from_utf8(bytes).map_err(|error| error.to_string()));
    text.map(Value::from).map_err(|error| minijinja::Error::new(ErrorKind::BadSerialization, error))
}

/// A space after every comma and colon.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::{ChatMessage, ChatTemplate};
    use crate::tokenizer::TokenizerError;

    fn render(source: &str, messages: &[ChatMessage]) -> Result<String, TokenizerError> {
        ChatTemplate::new(source, Some("<s>".to_owned()), None).render(messages, true)
    }

    #[test]
    fn templates_have_blocks_trimmed_and_python_methods() {
        let source = "{{ bos_token }}\n{% for m in messages %}\n  {%- if m.content.startswith('a') %}\n\
                      {{ m['content'].strip().split('|')[-1] | tojson }}\n  {% endif %}\n{% endfor %}\n";
        let text = render(source, &[ChatMessage::new("user", "a | <b>é ")]).unwrap();
        assert_eq!(text, "<s>\n\" <b>é\"\n");
    }

    #[test]
    fn tojson_writes_as_python_does() {
        let text = render("{{ messages | tojson }}", &[ChatMessage::new("user", "\"x\"")]).unwrap();
        assert_eq!(text, r#"[{"role": "user", "content": "\"x\""}]"#);
    }

    #[test]
    fn a_template_can_refuse_its_messages() {
        let error = render("{{ raise_exception('roles must alternate') }}", &[]).unwrap_err();
        assert!(error.to_string().contains("roles must alternate"), "{error}");
    }
}
