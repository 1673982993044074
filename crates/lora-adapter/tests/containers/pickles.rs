//! Hostile pickles: refused by what they try, with nothing run and no more memory than the file has.

use std::time::{Duration, Instant};

use lora_adapter::{PickleError, Reason};

use crate::support::{Pickle, archive, name, open_bin, reason};

/// The reason for refusing this pickle.
#[track_caller]
fn refused(pickle: &[u8]) -> PickleError {
    let start = Instant::now();
    let found = reason(open_bin(&archive(pickle)));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    match found {
        Reason::Pickle(error) => error,
        other => panic!("refused by {other}"),
    }
}

fn proto(rest: &[u8]) -> Vec<u8> {
    [b"\x80\x02", rest].concat()
}

#[test]
fn names_of_code_are_refused_before_they_are_called() {
    let marker = std::env::temp_dir().join(format!("lora-adapter-pickle-{}", std::process::id()));
    let command = format!("touch {}", marker.display());
    for (module, callee) in [
        ("os", "system"),
        ("posix", "system"),
        ("subprocess", "Popen"),
        ("builtins", "eval"),
        ("__builtin__", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_parameter_with_state"),
        ("torch._tensor", "_rebuild_from_type_v2"),
        ("torch", "FloatStorage.from_file"),
        ("torch", "_utils"),
        ("collections", "OrderedDict.update"),
        ("codecs", "encode"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("__main__", "X"),
    ] {
        let global = Pickle::default().op(format!("\u{2}c{module}\n{callee}\n"));
        let reduce = [b"\x80", &global.text(&command).op(b"\x85R.").0[..]].concat();
        assert_eq!(
            refused(&reduce),
            PickleError::ForbiddenGlobal { global: format!("{module}.{callee}"), offset: 2 },
            "{module} {callee}"
        );
        let by_stack = Pickle::default().op(b"\x80\x04").text(module).text(callee).op(b"\x93").text(&command);
        let found = refused(&by_stack.op(b"\x85R.").0);
        assert!(matches!(found, PickleError::ForbiddenGlobal { .. }), "{found}");
    }
    assert!(!marker.exists(), "nothing was run");
}

#[test]
fn protocol_0_is_refused() {
    let found = refused(b"cos\nsystem\n(S'false'\ntR.");
    assert_eq!(found, PickleError::ForbiddenGlobal { global: "os.system".into(), offset: 0 });
    assert_eq!(refused(b"(dp0\nS'a'\n."), PickleError::ForbiddenOpcode { opcode: b'd', offset: 1 });
}

/// Opcodes that make objects, take code from registries or from outside, or copy without limit.
#[test]
fn opcodes_that_tensors_do_not_need_are_refused() {
    for opcode in [
        b'i', b'o', b'P', b'S', b'T', b'U', b'V', b'F', b'I', b'L', b'B', b'C', b'0', b'1', b'2', b'd', b'g', b'l',
        b'p', 0x81, 0x82, 0x83, 0x84, 0x8b, 0x8d, 0x8e, 0x8f, 0x90, 0x91, 0x92, 0x96, 0x97, 0x98, 0x00, 0xff,
    ] {
        let found = refused(&proto(&[b'}', opcode, 1, 0, 0, 0, b'.']));
        assert_eq!(found, PickleError::ForbiddenOpcode { opcode, offset: 3 });
    }
}

#[test]
fn calls_take_only_what_torch_writes() {
    let forbidden = |rest: &[u8]| {
        let found = refused(&proto(rest));
        assert!(matches!(found, PickleError::ForbiddenCall { .. } | PickleError::BadArguments { .. }), "{found}");
    };
    // Storages and dtypes are no functions; neither is what a function gave.
    forbidden(b"ctorch\nFloatStorage\n)R.");
    forbidden(b"ctorch\nfloat8_e4m3fn\n)R.");
    forbidden(b"ccollections\nOrderedDict\n)R)R.");
    forbidden(b"})R.");
    forbidden(b"ccollections\nOrderedDict\n}R.");
    forbidden(b"ccollections\nOrderedDict\nK\x01\x85R.");
    forbidden(b"ctorch._utils\n_rebuild_tensor_v2\n)R.");
    forbidden(b"ctorch._utils\n_rebuild_parameter\nK\x01\x88}\x87R.");
    // Persistent ids are storages.
    forbidden(b"X\x01\x00\x00\x00aQ.");
    forbidden(b")Q.");
    forbidden(b"X\x06\x00\x00\x00moduleQ.");
    // Negative sizes, and more dimensions than tensors have.
    for shape in [&[-1, 8][..], &[4, -8], &[1; 9]] {
        let pickle = Pickle::default().op(b"}").text("a").tensor("0", 32, 0, shape, shape).op(b"s.");
        forbidden(&pickle.0);
    }
    let negative = Pickle::default().op(b"}").text("a").tensor("0", 32, -1, &[1], &[1]).op(b"s.");
    forbidden(&negative.0);
    let negative = Pickle::default().op(b"}").text("a").tensor("0", -32, 0, &[1], &[1]).op(b"s.");
    forbidden(&negative.0);
    let unequal = Pickle::default().op(b"}").text("a").tensor("0", 32, 0, &[1, 2], &[1]).op(b"s.");
    forbidden(&unequal.0);
}

/// torch says in the last argument of a tensor that its elements are to be negated or conjugated.
#[test]
fn metadata_that_changes_a_tensor_is_refused() {
    let with_metadata = |metadata: &[u8]| {
        let mut pickle = Pickle::default().op(b"\x80\x02}").text("a").tensor("0", 32, 0, &[4, 8], &[8, 1]).0;
        // The arguments end with the call: `tR`.
        pickle.truncate(pickle.len() - 2);
        pickle.extend_from_slice(metadata);
        pickle.extend_from_slice(b"tRs.");
        pickle
    };
    for changing in [&b"}X\x03\x00\x00\x00neg\x88s"[..], b"}X\x04\x00\x00\x00conj\x88s", b"K\x01", b"}}"] {
        let found = refused(&with_metadata(changing));
        assert!(matches!(found, PickleError::BadArguments { .. }), "{found}");
    }
    for plain in [&b""[..], b"N", b"}"] {
        // Goes on to the archive, which has no such tensor.
        assert!(!matches!(reason(open_bin(&archive(&with_metadata(plain)))), Reason::Pickle(_)));
    }
}

/// A state may only be the versions of modules, on a dictionary.
#[test]
fn states_are_refused() {
    let build =
        |target: &[u8], key: &str| Pickle::default().op(b"\x80\x02").op(target).op(b"}").text(key).op(b"Nsb.").0;
    for (target, key) in [(&b"}"[..], "__class__"), (b"}", "__dict__"), (b"]", "_metadata"), (b"N", "_metadata")] {
        assert!(matches!(refused(&build(target, key)), PickleError::ForbiddenCall { .. }));
    }
    let on_class = build(b"ccollections\nOrderedDict\n", "_metadata");
    assert!(matches!(refused(&on_class), PickleError::ForbiddenCall { .. }));
    let tensor = Pickle::default().tensor("0", 32, 0, &[1], &[1]).0;
    assert!(matches!(refused(&build(&tensor, "_metadata")), PickleError::ForbiddenCall { .. }));
}

#[test]
fn lengths_beyond_the_file_are_refused() {
    for rest in [
        &b"X\xff\xff\xff\xff"[..],
        b"X\xff\xff\xff\x7fabc.",
        b"\x8c\xffabc.",
        b"\x8a\xff\x01.",
        b"cos",
        b"cos\nsystem",
        b"J\x01",
        b"",
        b"}",
        b"\x95\x01",
        b"(((((",
    ] {
        let bytes = proto(rest);
        assert_eq!(refused(&bytes), PickleError::Truncated { offset: bytes.len() }, "{rest:?}");
    }
    assert_eq!(refused(b""), PickleError::Truncated { offset: 0 });
    // A number of 2,040 bits.
    let long = [&b"\x8a\xff"[..], &[1; 255], b"."].concat();
    assert_eq!(refused(&proto(&long)), PickleError::BadValue { offset: 2 });
    assert_eq!(refused(&proto(b"X\x02\x00\x00\x00\xff\xfe.")), PickleError::BadValue { offset: 2 });
}

#[test]
fn stack_and_memo_are_checked() {
    for rest in [&b"."[..], b"0", b"R.", b"}R.", b"s.", b"}Ns.", b"u.", b"}(Nu.", b"t.", b"e.", b"Na.", b"\x87.", b"b."]
    {
        let found = refused(&proto(rest));
        let expected = matches!(
            found,
            PickleError::BadStack { .. } | PickleError::ForbiddenOpcode { .. } | PickleError::ForbiddenCall { .. }
        );
        assert!(expected, "{rest:?}: {found}");
    }
    assert_eq!(refused(&proto(b"h\x05.")), PickleError::BadMemo { index: 5, offset: 2 });
    assert_eq!(refused(&proto(b"j\xff\xff\xff\xff.")), PickleError::BadMemo { index: u32::MAX, offset: 2 });
    // What lies below a mark is out of reach.
    assert!(matches!(refused(&proto(b"}((R.")), PickleError::BadStack { .. }));
    assert!(matches!(refused(&proto(b"}(.")), PickleError::BadStack { .. }));
    assert!(matches!(refused(&proto(b"N}.")), PickleError::BadStack { .. }));
    assert_eq!(refused(&proto(b"}.x")), PickleError::TrailingBytes { offset: 4 });
}

/// Nesting and self-reference cost no stack of ours.
#[test]
fn recursion_bombs_are_flat() {
    let nested = [&b"\x80\x02)"[..], &b"\x85".repeat(400_000), b"."].concat();
    assert!(matches!(refused(&nested), PickleError::TooMany { .. }));
    let nested = [&b"\x80\x02)"[..], &b"\x85q\x00h\x00q\x00".repeat(100), b"."].concat();
    assert!(matches!(refused(&nested), PickleError::BadStack { .. }));
    let lists = [&b"\x80\x02"[..], &b"]".repeat(20_000), b"."].concat();
    assert!(matches!(refused(&lists), PickleError::TooMany { .. }));
    let marks = [&b"\x80\x02"[..], &b"(".repeat(20_000), b"."].concat();
    assert!(matches!(refused(&marks), PickleError::TooMany { .. }));
    // A dictionary in itself, as key and as value.
    let own_value = Pickle::default().op(b"\x80\x02}q\x00").text("a").op(b"h\x00s.");
    assert!(matches!(refused(&own_value.0), PickleError::NotATensor { found: "a dictionary", .. }));
    let own_key = Pickle::default().op(b"\x80\x02}q\x00h\x00h\x00s.");
    assert!(matches!(refused(&own_key.0), PickleError::NotATensor { .. }));
}

/// Each level of the tuples refers to the one before ten times: 10^30 items if anyone unfolded them.
#[test]
fn memo_bombs_are_not_unfolded() {
    let level = [&b"("[..], &b"h\x00".repeat(10), b"tq\x00"].concat();
    let pickle = [&b"\x80\x02)q\x00"[..], &level.repeat(30), b"."].concat();
    assert!(matches!(refused(&pickle), PickleError::BadStack { .. } | PickleError::NotADictionary { .. }));
    let puts = [&b"\x80\x02N"[..], &b"\x94".repeat(600_000), b"."].concat();
    assert!(matches!(refused(&puts), PickleError::TooMany { .. }));
    let block = [&b"("[..], &b"N".repeat(5_000), b"t\x85"].concat();
    let items = [&b"\x80\x02("[..], &block.repeat(100), b"t."].concat();
    assert!(matches!(refused(&items), PickleError::TooMany { .. }));
}

/// One long string under many names: it stays where it is.
#[test]
fn long_strings_are_not_copied() {
    let long = "x".repeat(1 << 20);
    let pickle = Pickle::default().op(b"\x80\x02}(").text(&long).op(b"q\x00");
    let pickle = pickle.tensor("0", 32, 0, &[4, 8], &[8, 1]).op(b"q\x01");
    let pickle = pickle.op(b"h\x00h\x01".repeat(1_000)).op(b"u.");
    let found = reason(open_bin(&archive(&pickle.0)));
    assert!(matches!(found, Reason::DuplicateTensor { .. }), "{found}");
    assert!(found.to_string().len() < 1000);
}

#[test]
fn files_that_hold_something_else_are_named() {
    for (rest, found) in [(&b"N."[..], "None"), (b"K\x01.", "a number"), (b"].", "a list"), (b"\x88.", "a boolean")] {
        assert_eq!(refused(&proto(rest)), PickleError::NotADictionary { found });
    }
    let nested = Pickle::default().op(b"\x80\x02}").text("state_dict").op(b"}s.");
    let expected = PickleError::NotATensor { entry: "state_dict".into(), found: "a dictionary" };
    assert_eq!(refused(&nested.0), expected);
    let number = Pickle::default().op(b"\x80\x02}").text(&name("A")).int(5).op(b"s.");
    assert_eq!(refused(&number.0), PickleError::NotATensor { entry: name("A"), found: "a number" });
    let escaped = Pickle::default().op(b"\x80\x02}").text("a\u{1b}[31m\n\0").op(b"Ns.");
    assert!(!refused(&escaped.0).to_string().contains(['\u{1b}', '\n', '\0']));
    assert!(matches!(reason(open_bin(&archive(&proto(b"}.")))), Reason::NoPairs { num_tensors: 0 }));
}
